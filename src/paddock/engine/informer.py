"""A shared, indexed, read-only picture of one kind, kept fresh by list and watch.

Reads never wait and never leave the process. Handlers hear of every change as `(old, new)`,
synchronously, on the loop; they must be quick (put a key on a queue, wake a future).

A watch that breaks is opened again where it was, with growing delay. After a gap the kind is
listed anew and compared, so that no deletion is ever missed. By which rules knowledge grows is
`picture`'s business; which kinds and indexes there are is `paddock.cache`'s.
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
"""What trying again does not mend; it ends an informer that has not synced yet."""

_ERRORS = metrics.counter("paddock_informer_errors_total", "Failed lists and watches.", ("kind",))
_RELISTS = metrics.counter("paddock_informer_lists_total", "Lists from the beginning.", ("kind",))

_BREATH = 256
"""After so many changes without a pause, others on the loop get a turn."""


class InformerFailure(Struct, frozen=True, kw_only=True):
    """What went wrong last."""

    at: datetime
    error: Exception


class Informer(ObjectIndex[R]):
    """A picture of one kind that keeps itself fresh."""

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
        self._problem: InformerFailure | None = None
        self._problem_at = 0.0

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
        """What went wrong last, however long ago."""
        return self._problem

    def is_healthy(self, *, quiet_seconds: float = 30.0) -> bool:
        """Say whether this is synced and nothing has gone wrong for a while."""
        if not self._synced.is_set():
            return False
        if self._problem is None:
            return True
        return self._clock.monotonic() - self._problem_at >= quiet_seconds

    # ---- following the store -------------------------------------------------------------

    async def run(self) -> None:
        """Follow the store until cancelled; raises only what prevents the first sync for good."""
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
            # The first page's: all pages should say the same, and the oldest is always safe.
            version = version or page.version
            if ordinal(version) < self._seen:
                raise UnavailableError(
                    f"the list of {self.kind.KIND} is of version {version}, "
                    f"older than {self._seen}, which was seen before",
                    hint="if the store was restored from a backup, restart this process",
                )
            if not page.continue_token:
                await self._take_page(page, seen)
                break
            # The store writes the next page while we take this one in.
            name = f"next page of {self.kind.KIND}"
            async with background(self._page(page.continue_token), name=name) as coming:
                await self._take_page(page, seen)
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

    async def _take_page(self, page: Page[R], seen: set[Key]) -> None:
        for number, obj in enumerate(page.items, start=1):
            seen.add(obj.key)
            self._upsert(obj, version_of(obj))
            if number % _BREATH == 0:
                await asyncio.sleep(0)

    async def _follow(self) -> None:
        stream = self._store.watch(
            self.kind, since=self._since, namespace=self._only.namespace, labels=self._only.labels
        )
        taken = 0
        self._opened_at = self._clock.monotonic()
        async with aclosing(stream) as events:
            async for event in events:
                self._take(event)
                self._failures = 0
                taken += 1
                if taken % _BREATH == 0:
                    await asyncio.sleep(0)

    # ---- trouble -------------------------------------------------------------------------

    def _after_quiet_end(self) -> float:
        # Servers end watches now and then; one that ends them at once must not make us spin.
        if self._clock.monotonic() - self._opened_at >= self._backoff.cap_seconds:
            self._failures = 0
        self._failures += 1
        return self._backoff.delay(self._failures - 1)

    def _after_gone(self, error: GoneError) -> float:
        self._failures += 1
        log.info(
            "watch is too far behind, listing anew",
            extra=fields(kind=self.kind.KIND, error=error, times=self._failures),
        )
        return self._backoff.delay(self._failures - 1)

    def _after_failure(self, error: Exception) -> float:
        self._failures += 1
        pause = self._backoff.delay(self._failures)
        self._problem = InformerFailure(at=self._clock.now(), error=error)
        self._problem_at = self._clock.monotonic()
        _ERRORS.labels(self.kind.KIND).inc()
        log.warning(
            "informer lost the store, trying again",
            extra=fields(
                kind=self.kind.KIND, error=repr(error), failures=self._failures, seconds=pause
            ),
        )
        return pause
