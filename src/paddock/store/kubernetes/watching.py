"""Watch streams: split chunks into lines, decode events, and reconnect.

A watch that breaks or that the server ends is resumed from the last version seen. It fails only
if that version was compacted (`GoneError`) or the server is unreachable for too long; the reader
then lists again.
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

MAX_LINE_BYTES = 32 << 20
"""Far above the object size limit of etcd; a longer line is not a watch event."""
MAX_OUTAGE_SECONDS = 60.0
"""How long the server may be unreachable before the watch fails."""
_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 5.0
_LIFETIME_SECONDS = (300, 600)
"""Range of the random lifetime of a connection, to spread load over API server replicas."""

_jitter = random.SystemRandom()


class LineSplitter:
    """Splits a stream of chunks into lines, in one pass."""

    def __init__(self, longest: int = MAX_LINE_BYTES) -> None:
        self._partial: list[bytes] = []
        self._size = 0
        self._longest = longest

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Add a chunk and return the lines that it completes, without line ends."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            line = chunk[start:end]
            if self._partial:
                self._partial.append(line)
                line = b"".join(self._partial)
                self._partial.clear()
                self._size = 0
            if line:
                yield line
            start = end + 1
        if start < len(chunk):
            self._partial.append(chunk[start:])
            self._size += len(chunk) - start
            if self._size > self._longest:
                raise TooLargeError(f"a watch event is longer than {self._longest} bytes")


class Watch(Generic[R]):
    """A watch of one kind over consecutive connections."""

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
        """Stream every change after a version."""
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
                # The token may have expired: try the renewed one once.
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
        if now - self._lost_since > MAX_OUTAGE_SECONDS:
            raise final from cause
        self._delay = min(max(self._delay * 2, _FIRST_DELAY_SECONDS), _LONGEST_DELAY_SECONDS)
        if isinstance(cause, RateLimitedError):
            # Twice the requested delay, as jitter may halve it.
            requested = min(cause.retry_after_seconds, MAX_OUTAGE_SECONDS / 2)
            self._delay = max(self._delay, 2 * requested)
        log.info(
            "watch interrupted and resumed",
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
        # Servers end watches regularly. Back off in case they do so at once every time.
        self._delay = min(max(self._delay * 2, _FIRST_DELAY_SECONDS), _LONGEST_DELAY_SECONDS)


def read(kind: type[R], line: bytes) -> WatchEvent[R] | None:
    """Decode one line of a watch; an object that cannot be decoded is logged and skipped."""
    if not line.startswith((b'{"type":"BOOKMARK"', b'{"type":"ERROR"')):
        try:
            change, obj = responses.read_event(kind, line)
            return WatchEvent(Change(change), obj, obj.metadata.resource_version)
        except (msgspec.ValidationError, ValueError):
            # Another type of event, or an object that cannot be decoded.
            return _read_other(kind, line)
    return _read_other(kind, line)


def _read_other(kind: type[R], line: bytes) -> WatchEvent[R] | None:
    try:
        event = responses.read_raw_event(line)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"the API server sent an invalid watch event: {error}") from error
    if event.type == "ERROR":
        status = statuses.read(500, bytes(event.object))
        raise statuses.error_from(status)
    metadata = responses.read_meta(event.object)
    if event.type == Change.BOOKMARK:
        return WatchEvent(Change.BOOKMARK, None, metadata.resource_version)
    if event.type == Change.DELETED:
        # Watchers need the deletion even if the object cannot be decoded.
        gone = with_meta(kind(), name=metadata.name, namespace=metadata.namespace, uid=metadata.uid)
        return WatchEvent(Change.DELETED, gone, metadata.resource_version)
    responses.log_unreadable(kind, event.object, ValueError("unexpected shape"))
    return None
