"""Group commit: many writers, one fsync.

While a batch is being written by the thread, new writes gather in the next one. When the thread
is done, the batch becomes visible at once and its writers are notified; when it failed, it and
everything decided on top of it are rolled back, and all those writers get the error.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from paddock.kit import metrics
from paddock.kit.clock import system
from paddock.kit.errors import UnavailableError
from paddock.resources import codec
from paddock.store.sqlite.database import Database, Row
from paddock.store.working_set import Mutation, WorkingSet

log = logging.getLogger(__name__)

_SECONDS = metrics.histogram(
    "paddock_store_commit_seconds", "How long a batch of writes took to become durable."
)
_WRITES = metrics.counter("paddock_store_writes_total", "Changes of objects made durable.")
_FAILURES = metrics.counter(
    "paddock_store_commit_failures_total", "Batches of writes that could not be made durable."
)


class CommitGroup:
    """Writes that become durable together."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.mutations: list[Mutation] = []
        self.error: Exception | None = None
        self._waiting: list[asyncio.Future[bool]] = []

    async def settled(self) -> bool:
        """Wait for the end; says whether it is durable now."""
        # A future for each: one who gives up must not take the others along.
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return await future

    def settle(self, error: Exception | None) -> None:
        """Notify the waiters."""
        self.error = error
        for future in self._waiting:
            if not future.done():
                future.set_result(error is None)


class GroupCommit:
    """Puts batches through a database on a thread of its own."""

    def __init__(self, working: WorkingSet, database: Database) -> None:
        self._working = working
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._gathering: CommitGroup | None = None
        self._is_writing = False
        self._quiet: asyncio.Future[None] | None = None
        self._handed: SimpleQueue[CommitGroup | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paddock-store", daemon=True)
        self._thread.start()

    async def commit(self, mutations: Sequence[Mutation]) -> None:
        """Return when these are durable and visible; `UnavailableError` when they never will."""
        batch = self._gathering
        if batch is None:
            self._number += 1
            batch = self._gathering = CommitGroup(self._number)
            if not self._is_writing:
                # Not at once: others who are ready to run now may have something to add.
                self._is_writing = True
                self._loop.call_soon(self._hand_over)
        batch.mutations.extend(mutations)
        self._working.decide(mutations, batch)
        if not await batch.settled():
            raise _refusal(batch.error)

    async def close(self) -> None:
        """Finish what is under way, end the thread and close the file."""
        while self._is_writing:
            self._quiet = self._loop.create_future()
            await self._quiet
        self._handed.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._database.close)

    def _hand_over(self) -> None:
        batch, self._gathering = self._gathering, None
        self._is_writing = batch is not None
        if batch is not None:
            self._handed.put(batch)
        elif self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def _written(self, batch: CommitGroup, error: Exception | None) -> None:
        if error is None:
            self._working.apply(batch.mutations)
            batch.settle(None)
        else:
            # The next batch was decided on top of this one; it cannot stand without it.
            fallen = [batch] if self._gathering is None else [batch, self._gathering]
            self._gathering = None
            for item in fallen:
                self._working.roll_back(item.mutations)
            for item in fallen:
                item.settle(error)
        if self._gathering is not None:
            # The next batch is written while the notified writers go on.
            self._hand_over()
        else:
            # They get to run first, and may all be in the next batch.
            self._loop.call_soon(self._hand_over)

    # ---- on the thread -------------------------------------------------------------------

    def _run(self) -> None:
        clock = system()
        while (batch := self._handed.get()) is not None:
            error: Exception | None = None
            started = clock.monotonic()
            try:
                self._database.write([row(mutation) for mutation in batch.mutations])
                _SECONDS.observe(clock.monotonic() - started)
                _WRITES.inc(len(batch.mutations))
            except Exception as failure:  # noqa: BLE001 - every error goes to the writers
                error = failure
                _FAILURES.inc()
            try:
                self._loop.call_soon_threadsafe(self._written, batch, error)
            except RuntimeError:
                log.warning("the event loop ended before the last writers were notified")
                return
            self._database.fold(is_idle=self._handed.empty())


def row(mutation: Mutation) -> Row:
    """Write a change as the database takes it."""
    (kind, key), entry = mutation
    after = mutation.after
    body = None if after is None else codec.encode(after)
    return (kind.KIND, key.namespace, key.name, entry.version, body)


def _refusal(error: Exception | None) -> UnavailableError:
    # A new error for each writer: one that is shared would collect their tracebacks.
    if isinstance(error, UnavailableError):
        return UnavailableError(
            error.message, retry_after_seconds=error.retry_after_seconds, hint=error.hint
        )
    return UnavailableError(f"the store could not write: {error!r}")
