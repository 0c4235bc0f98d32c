"""Group commit: many writers, one fsync.

While the thread writes a batch, new writes are collected in the next one. A written batch becomes
visible and its writers are notified. If the write failed, the batch and the next one, which
depends on it, are rolled back, and their writers get the error.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar, cast

from paddock.kit import metrics
from paddock.kit.clock import system
from paddock.kit.errors import UnavailableError
from paddock.resources import codec
from paddock.store.sqlite.database import Database, Row
from paddock.store.working_set import Mutation, WorkingSet

log = logging.getLogger(__name__)
T = TypeVar("T")

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
        """Wait for the commit and return whether it is durable."""
        # One future per waiter: cancelling one waiter must not cancel the others.
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
    """Writes batches to the database on a dedicated thread."""

    def __init__(self, working: WorkingSet, database: Database) -> None:
        self._working = working
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._next: CommitGroup | None = None
        self._is_writing = False
        self._idle: asyncio.Future[None] | None = None
        self._batches: SimpleQueue[CommitGroup | Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paddock-store", daemon=True)
        self._thread.start()

    async def commit(self, mutations: Sequence[Mutation]) -> None:
        """Return when the mutations are durable and visible; `UnavailableError` if that fails."""
        batch = self._next
        if batch is None:
            self._number += 1
            batch = self._next = CommitGroup(self._number)
            if not self._is_writing:
                # In the next turn of the loop, so that tasks that are ready now can join the batch.
                self._is_writing = True
                self._loop.call_soon(self._write_next)
        batch.mutations.extend(mutations)
        self._working.decide(mutations, batch)
        if not await batch.settled():
            raise _commit_error(batch.error)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on the thread of the database, between two batches, and return its result."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():  # its waiter was cancelled
                return
            if error is None:
                future.set_result(cast("T", result))
            else:
                future.set_exception(error)

        def job() -> None:
            result, failure = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - every error goes to the caller
                failure = error
            self._notify(settle, result, failure)

        self._batches.put(job)
        return await future

    async def close(self) -> None:
        """Finish commits in flight, end the thread and close the file."""
        while self._is_writing:
            self._idle = self._loop.create_future()
            await self._idle
        self._batches.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._database.close)

    def _write_next(self) -> None:
        batch, self._next = self._next, None
        self._is_writing = batch is not None
        if batch is not None:
            self._batches.put(batch)
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _written(self, batch: CommitGroup, error: Exception | None) -> None:
        if error is None:
            self._working.apply(batch.mutations)
            batch.settle(None)
        else:
            # The next batch was decided on top of this one and depends on it.
            failed = [batch] if self._next is None else [batch, self._next]
            self._next = None
            for item in failed:
                self._working.roll_back(item.mutations)
            for item in failed:
                item.settle(error)
        if self._next is not None:
            # Write the next batch while the notified writers continue.
            self._write_next()
        else:
            # Run the notified writers first, so that all of them can join the next batch.
            self._loop.call_soon(self._write_next)

    # ---- on the thread -------------------------------------------------------------------

    def _run(self) -> None:
        clock = system()
        while (batch := self._batches.get()) is not None:
            if not isinstance(batch, CommitGroup):
                batch()
                self._database.checkpoint(is_idle=self._batches.empty())
                continue
            error: Exception | None = None
            started = clock.monotonic()
            try:
                self._database.write([row(mutation) for mutation in batch.mutations])
                _SECONDS.observe(clock.monotonic() - started)
                _WRITES.inc(len(batch.mutations))
            except Exception as failure:  # noqa: BLE001 - every error goes to the writers
                error = failure
                _FAILURES.inc()
            self._notify(self._written, batch, error)
            self._database.checkpoint(is_idle=self._batches.empty())

    def _notify(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.warning("the event loop ended before the last writers were notified")


def row(mutation: Mutation) -> Row:
    """Return the database row of a change."""
    (kind, key), entry = mutation
    after = mutation.after
    body = None if after is None else codec.encode(after)
    return (kind.KIND, key.namespace, key.name, entry.version, body)


def _commit_error(error: Exception | None) -> UnavailableError:
    # A new error for each writer: a shared one would accumulate their tracebacks.
    if isinstance(error, UnavailableError):
        return UnavailableError(
            error.message, retry_after_seconds=error.retry_after_seconds, hint=error.hint
        )
    return UnavailableError(f"the write to the store failed: {error!r}")
