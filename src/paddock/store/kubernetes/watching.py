"""Event streams: lines out of chunks, events out of lines, and one stream out of many connections.

A watch that breaks or that the server ends is resumed from the last version seen. Only a version
that the server has forgotten (`GoneError`) and a server that stays away end it; listing anew is
the reader's business.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Generic

import msgspec

from paddock.kit.errors import (
    DeadlineExceededError,
    RateLimitedError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.resources.meta import R, with_meta
from paddock.store.kubernetes import responses, statuses
from paddock.store.kubernetes.client import KubernetesClient
from paddock.store.port import Change, WatchEvent

log = logging.getLogger(__name__)

LONGEST_LINE_BYTES = 32 << 20
"""Far above what etcd stores; a stream that exceeds it is not a watch."""
PATIENCE_SECONDS = 60.0
"""How long a server may stay away before the watch gives up."""
_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 5.0
_LIFETIME_SECONDS = (300, 600)
"""Connections are renewed at a random age, so that replicas behind a balancer share the load."""

_jitter = random.SystemRandom()


class LineSplitter:
    """Cuts a stream of chunks into lines; no byte is looked at or copied twice."""

    def __init__(self, longest: int = LONGEST_LINE_BYTES) -> None:
        self._begun: list[bytes] = []
        self._size = 0
        self._longest = longest

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take a chunk; give the lines that it ends, without their ends."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            line = chunk[start:end]
            if self._begun:
                self._begun.append(line)
                line = b"".join(self._begun)
                self._begun.clear()
                self._size = 0
            if line:
                yield line
            start = end + 1
        if start < len(chunk):
            self._begun.append(chunk[start:])
            self._size += len(chunk) - start
            if self._size > self._longest:
                raise TooLargeError(f"a watch event is longer than {self._longest} bytes")


class Watch(Generic[R]):
    """One watch of one kind, over as many connections as it takes."""

    def __init__(
        self, client: KubernetesClient, kind: type[R], path: str, params: Mapping[str, str]
    ) -> None:
        self._client = client
        self._kind = kind
        self._path = path
        self._params = params
        self._version = ""
        self._lost_since: float | None = None
        self._delay = 0.0
        self._credential_refused = False

    async def follow(self, since: str) -> AsyncGenerator[WatchEvent[R]]:
        """Return every change after a version, for as long as it is read."""
        self._version = since
        while True:
            try:
                async with aclosing(self._connection()) as events:
                    async for event in events:
                        self._version = event.version
                        yield event
            except (UnavailableError, RateLimitedError, DeadlineExceededError) as error:
                self._lost(error, error)
            except UnauthenticatedError as error:
                # A token may end at any time; its successor gets one chance.
                if self._credential_refused:
                    raise
                self._credential_refused = True
                self._lost(error, UnavailableError(error.message))
            await asyncio.sleep(self._delay * _jitter.uniform(0.5, 1.0))

    def _connected(self) -> None:
        self._lost_since = None
        self._credential_refused = False

    def _lost(self, cause: Exception, final: Exception) -> None:
        now = asyncio.get_running_loop().time()
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since > PATIENCE_SECONDS:
            raise final from cause
        self._delay = min(max(self._delay * 2, _FIRST_DELAY_SECONDS), _LONGEST_DELAY_SECONDS)
        if isinstance(cause, RateLimitedError):
            # Twice what was asked, as half of a delay may be taken off again.
            asked = min(cause.retry_after_seconds, PATIENCE_SECONDS / 2)
            self._delay = max(self._delay, 2 * asked)
        log.info(
            "watch broke off and is resumed",
            extra=fields(kind=self._kind.KIND, since=self._version, cause=str(cause)),
        )

    async def _connection(self) -> AsyncGenerator[WatchEvent[R]]:
        params = {
            **self._params,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_jitter.randint(*_LIFETIME_SECONDS)),
        }
        splitter = LineSplitter()
        async with self._client.stream(
            self._path, resource=self._kind.PLURAL, params=params
        ) as content:
            self._connected()
            async for chunk in content.iter_any():
                for line in splitter.feed(chunk):
                    self._delay = 0.0
                    if (event := read(self._kind, line)) is not None:
                        yield event
        # Ended by the server, as it does; should it end at once, do not run in circles.
        self._delay = min(max(self._delay * 2, _FIRST_DELAY_SECONDS), _LONGEST_DELAY_SECONDS)


def read(kind: type[R], line: bytes) -> WatchEvent[R] | None:
    """Read one line of a watch; an object that does not fit its type is logged and left out."""
    if not line.startswith((b'{"type":"BOOKMARK"', b'{"type":"ERROR"')):
        try:
            change, obj = responses.read_event(kind, line)
            return WatchEvent(Change(change), obj, obj.metadata.resource_version)
        except (msgspec.ValidationError, ValueError):
            # Something else than a change, or an object of another shape: look closer.
            return _read_slowly(kind, line)
    return _read_slowly(kind, line)


def _read_slowly(kind: type[R], line: bytes) -> WatchEvent[R] | None:
    try:
        event = responses.read_raw_event(line)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"a watch sent something that is no event: {error}") from error
    if event.type == "ERROR":
        status = statuses.read(500, bytes(event.object))
        raise statuses.error_from(status)
    metadata = responses.read_meta(event.object)
    if event.type == Change.BOOKMARK:
        return WatchEvent(Change.BOOKMARK, None, metadata.resource_version)
    if event.type == Change.DELETED:
        # Whatever its shape, it is deleted, and watchers need the event.
        gone = with_meta(kind(), name=metadata.name, namespace=metadata.namespace, uid=metadata.uid)
        return WatchEvent(Change.DELETED, gone, metadata.resource_version)
    responses.log_unreadable(kind, event.object, ValueError("unexpected shape"))
    return None
