"""Informers: a shared, indexed, read-only cache of one kind, updated by list and watch.

Reads never wait and never leave the process. Handlers are called with every change as
`(old, new)`, synchronously, on the loop; they must be quick (enqueue a key, set an event).

A broken watch is reopened at its version, with backoff. After a gap the kind is listed again and
compared, so that no deletion is missed. The rules for updates are in `object_index`; kinds and
indexes are defined in `paddock.cache`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from datetime import datetime

from msgspec import Struct

from paddock.engine.indexes import IndexFunction
from paddock.engine.object_index import Filter, ObjectIndex
from paddock.engine.versions import ordinal, version_of
from paddock.kit import clock as clocks
from paddock.kit import metrics
from paddock.kit.backoff import Backoff
from paddock.kit.errors import (
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from paddock.kit.logs import fields
from paddock.kit.tasks import background
from paddock.resources.meta import Key, R
from paddock.store.port import Page, Store

log = logging.getLogger(__name__)

FATAL = (ForbiddenError, InvalidError, NotFoundError, UnauthenticatedError, UnsupportedError)
"""Errors that retrying does not fix; they end an informer that has not synced yet."""

_ERRORS = metrics.counter("paddock_informer_errors_total", "Failed lists and watches.", ("kind",))
_RELISTS = metrics.counter("paddock_informer_lists_total", "Lists from the beginning.", ("kind",))

_YIELD_EVERY = 256
"""After so many changes, yield to other tasks on the loop."""


class InformerFailure(Struct, frozen=True, kw_only=True):
    """The last error and its time."""

    at: datetime
    error: Exception


class Informer(ObjectIndex[R]):
    """An object index that follows the store."""

    def __init__(
        self,
        store: Store,
        kind: type[R],
        *,
        indexes: Mapping[str, IndexFunction[R]] | None = None,
        only: Filter | None = None,
        transform: Callable[[R], R] | None = None,
        clock: clocks.Clock | None = None,
        backoff: Backoff | None = None,
        page_size: int = 1000,
    ) -> None:
        self._clock = clock or clocks.system()
        super().__init__(
            kind, self._clock, indexes=indexes or {}, only=only or Filter(), transform=transform
        )
        self._store = store
        self._backoff = backoff or Backoff()
        self._page_size = page_size
        self._failures = 0
        self._opened_at = 0.0
        self._synced = asyncio.Event()
        self._last_failure: InformerFailure | None = None
        self._failed_at = 0.0

    # ---- state ---------------------------------------------------------------------------

    @property
    def is_synced(self) -> bool:
        """Whether the first list is complete."""
        return self._synced.is_set()

    async def wait_synced(self) -> None:
        """Wait for the first list to be complete."""
        await self._synced.wait()

    @property
    def last_failure(self) -> InformerFailure | None:
        """The last error, however long ago; `None` if there was none."""
        return self._last_failure

    def is_healthy(self, *, quiet_seconds: float = 30.0) -> bool:
        """Whether it has synced and had no error for `quiet_seconds`."""
        if not self._synced.is_set():
            return False
        if self._last_failure is None:
            return True
        return self._clock.monotonic() - self._failed_at >= quiet_seconds

    # ---- following the store -------------------------------------------------------------

    async def run(self) -> None:
        """Follow the store until cancelled; raises fatal errors before the first sync only."""
        while True:
            try:
                if not self._since:
                    await self._list()
                await self._follow()
                pause = self._after_quiet_end()
            except GoneError as error:
                self._since = ""
                pause = self._after_gone(error)
            except FATAL as error:
                if not self.is_synced:
                    raise
                pause = self._after_failure(error)
            except Exception as error:  # noqa: BLE001 - a task's root: any failure is retried
                pause = self._after_failure(error)
            await asyncio.sleep(pause)

    async def _list(self) -> None:
        _RELISTS.labels(self.kind.KIND).inc()
        started = self._clock.monotonic()
        seen: set[Key] = set()
        version = ""
        page = await self._page("")
        while True:
            # The first page's: all pages should have the same, and the oldest is always safe.
            version = version or page.version
            if ordinal(version) < self._seen:
                raise UnavailableError(
                    f"the list of {self.kind.KIND} is of version {version}, "
                    f"older than {self._seen}, which was seen before",
                    hint="if the store was restored from a backup, restart this process",
                )
            if not page.continue_token:
                await self._apply_page(page, seen)
                break
            # The store reads the next page while this one is processed.
            name = f"next page of {self.kind.KIND}"
            async with background(self._page(page.continue_token), name=name) as coming:
                await self._apply_page(page, seen)
                page = await coming
        self._list_is_complete(seen, version, started)
        if not self._synced.is_set():
            self._synced.set()
            log.info("informer synced", extra=fields(kind=self.kind.KIND, objects=len(self)))

    async def _page(self, token: str) -> Page[R]:
        return await self._store.list(
            self.kind,
            namespace=self._only.namespace,
            labels=self._only.labels,
            limit=self._page_size,
            continue_token=token,
        )

    async def _apply_page(self, page: Page[R], seen: set[Key]) -> None:
        for number, obj in enumerate(page.items, start=1):
            seen.add(obj.key)
            self._upsert(obj, version_of(obj))
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _follow(self) -> None:
        stream = self._store.watch(
            self.kind, since=self._since, namespace=self._only.namespace, labels=self._only.labels
        )
        taken = 0
        self._opened_at = self._clock.monotonic()
        async with aclosing(stream) as events:
            async for event in events:
                self._apply(event)
                self._failures = 0
                taken += 1
                if taken % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)

    # ---- failures -------------------------------------------------------------------------

    def _after_quiet_end(self) -> float:
        # Servers end watches now and then; one that ends them at once must not cause a busy loop.
        if self._clock.monotonic() - self._opened_at >= self._backoff.cap_seconds:
            self._failures = 0
        self._failures += 1
        return self._backoff.delay(self._failures - 1)

    def _after_gone(self, error: GoneError) -> float:
        self._failures += 1
        log.info(
            "watch is too far behind, relisting",
            extra=fields(kind=self.kind.KIND, error=error, times=self._failures),
        )
        return self._backoff.delay(self._failures - 1)

    def _after_failure(self, error: Exception) -> float:
        self._failures += 1
        pause = self._backoff.delay(self._failures)
        self._last_failure = InformerFailure(at=self._clock.now(), error=error)
        self._failed_at = self._clock.monotonic()
        _ERRORS.labels(self.kind.KIND).inc()
        log.warning(
            "informer lost the store, retrying",
            extra=fields(
                kind=self.kind.KIND, error=repr(error), failures=self._failures, seconds=pause
            ),
        )
        return pause
