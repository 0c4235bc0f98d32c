"""Assigns tasks to the sandboxes of shards and watches their reports.

One watch per shard with a running task is kept open. A sandbox that cannot be watched is retried
with backoff. The batch's status is the source of truth: after a restart everything is assigned and
watched again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

from msgspec import Struct

from paddock.controllers.batch.tasks.runner import TaskOrder, TaskReport, TaskRunner
from paddock.kit.backoff import Backoff
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.batch import TaskState
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

log = logging.getLogger(__name__)

CONCURRENCY = 64
STOP_SECONDS = 20.0
_BACKOFF = Backoff(base_seconds=0.1, cap_seconds=5.0)
FAILURES = (PaddockError, OSError, TimeoutError)


class WatchedTask(Struct, frozen=True, kw_only=True):
    """A task to run and watch in a shard."""

    sandbox: Sandbox
    sandbox_id: str
    order: TaskOrder


class _BatchWatches:
    """Watches and latest reports of one batch."""

    def __init__(self) -> None:
        self.watches: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self.reports: dict[int, TaskReport] = {}


class TaskWatcher:
    """Watches every shard that runs a task."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._listeners: list[Callable[[Key], None]] = []
        self._batches: dict[Key, _BatchWatches] = {}
        self._semaphore = asyncio.Semaphore(CONCURRENCY)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Run the watches until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None
            self._batches.clear()

    def on_change(self, listener: Callable[[Key], None]) -> None:
        """Call `listener` with a batch's key whenever one of its tasks' reports changes."""
        self._listeners.append(listener)

    def _notify(self, batch: Key) -> None:
        for listener in self._listeners:
            listener(batch)

    def reports(self, batch: Key) -> Mapping[int, TaskReport]:
        """Return the latest report of each shard's task."""
        found = self._batches.get(batch)
        return {} if found is None else found.reports

    def watch(self, batch: Key, tasks: Mapping[int, WatchedTask]) -> None:
        """Watch exactly these shards."""
        found = self._batches.get(batch)
        if found is None:
            if not tasks:
                return
            found = self._batches.setdefault(batch, _BatchWatches())
        for shard in [shard for shard in found.watches if shard not in tasks]:
            self._drop(found, shard)
        if self._tasks is None:
            return
        for shard, task in tasks.items():
            known = found.watches.get(shard)
            if known is not None and known[0] == task.sandbox.metadata.uid:
                continue
            if known is not None:
                self._drop(found, shard)
            watch = self._tasks.create_task(
                self._watch(batch, found, shard, task), name=f"tasks of {batch} shard {shard}"
            )
            found.watches[shard] = (task.sandbox.metadata.uid, watch)

    def forget(self, batch: Key) -> None:
        """Stop all watches of a batch."""
        found = self._batches.pop(batch, None)
        if found is not None:
            for shard in tuple(found.watches):
                self._drop(found, shard)

    def _drop(self, found: _BatchWatches, shard: int) -> None:
        found.watches.pop(shard)[1].cancel()
        found.reports.pop(shard, None)

    async def stop(self, sandbox: Sandbox, sandbox_id: str, *, seconds: float) -> bool:
        """Stop all tasks of a sandbox; return whether they are known to have ended."""
        try:
            async with asyncio.timeout(STOP_SECONDS + seconds), self._semaphore:
                left = await self._runner.assign(sandbox, sandbox_id, ())
                if not left:
                    return True
                stream = cast("Any", self._runner.watch(sandbox, sandbox_id))
                async with aclosing(stream) as updates:
                    async for reports in updates:
                        if not reports:
                            return True
        except FAILURES as error:
            log.info(
                "cannot stop the tasks of a sandbox",
                extra=fields(sandbox=sandbox.key, error=str(error) or type(error).__name__),
            )
        return False

    async def _watch(self, batch: Key, found: _BatchWatches, shard: int, task: WatchedTask) -> None:
        failures = 0
        while True:
            try:
                async with self._semaphore:
                    reports = await self._runner.assign(
                        task.sandbox, task.sandbox_id, (task.order,)
                    )
                failures = 0
                if self._receive(batch, found, shard, task, reports):
                    return
                stream = cast("Any", self._runner.watch(task.sandbox, task.sandbox_id))
                async with aclosing(stream) as updates:
                    async for reports in updates:
                        if self._receive(batch, found, shard, task, reports):
                            return
            except FAILURES as error:
                failures += 1
                self._unreachable(batch, found, shard, task, failures, error)
            failures = max(failures, 1)
            await asyncio.sleep(_BACKOFF.delay(failures))

    def _receive(
        self,
        batch: Key,
        found: _BatchWatches,
        shard: int,
        task: WatchedTask,
        reports: tuple[TaskReport, ...],
    ) -> bool:
        report = next((item for item in reports if item.name == task.order.name), None)
        if report is None:
            return False
        if found.reports.get(shard) != report:
            found.reports[shard] = report
            self._notify(batch)
        return report.is_final

    def _unreachable(
        self,
        batch: Key,
        found: _BatchWatches,
        shard: int,
        task: WatchedTask,
        failures: int,
        error: Exception,
    ) -> None:
        message = str(error) or type(error).__name__
        log.debug("shard did not respond", extra=fields(batch=batch, shard=shard, error=message))
        last = found.reports.get(shard)
        if failures < 8 or (last is not None and last.state is TaskState.UNKNOWN):
            return
        attempt = last.attempt if last else task.order.first_attempt
        found.reports[shard] = TaskReport(
            name=task.order.name,
            state=TaskState.UNKNOWN,
            attempt=attempt,
            reason="Unreachable",
            message=f"its sandbox does not respond: {message}",
            started_at=last.started_at if last else None,
        )
        self._notify(batch)
