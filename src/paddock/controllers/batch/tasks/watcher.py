"""Follows the tasks of every shard: tells sandboxes what to run and gathers what they report.

One watch is held open per shard with a task under way; results are pushed through it. Where a
sandbox cannot be watched it is asked again and again, ever less often. Nothing here is truth: the
batch's status is, and after a restart everything is asked for anew.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

from msgspec import Struct

from paddock.controllers.batch.tasks.runner import Order, Report, TaskRunner
from paddock.kit.backoff import Backoff
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.batch import TaskState
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

log = logging.getLogger(__name__)

AT_ONCE = 64
STOP_SECONDS = 20.0
_BACKOFF = Backoff(base_seconds=0.1, cap_seconds=5.0)
FAILURES = (PaddockError, OSError, TimeoutError)


class Job(Struct, frozen=True, kw_only=True):
    """A shard with a task under way."""

    sandbox: Sandbox
    sandbox_id: str
    order: Order


class _Batch:
    """What is followed of one batch."""

    def __init__(self) -> None:
        self.watches: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self.reports: dict[int, Report] = {}


class Follower:
    """Keeps a watch on every shard that runs a task."""

    def __init__(self, runner: TaskRunner, on_change: Callable[[Key], None]) -> None:
        self._runner = runner
        self._on_change = on_change
        self._batches: dict[Key, _Batch] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Be there for watches until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None
            self._batches.clear()

    def reports(self, batch: Key) -> Mapping[int, Report]:
        """Give what was heard last of each shard's task."""
        found = self._batches.get(batch)
        return {} if found is None else found.reports

    def ensure(self, batch: Key, jobs: Mapping[int, Job]) -> None:
        """Follow these shards and no others."""
        found = self._batches.get(batch)
        if found is None:
            if not jobs:
                return
            found = self._batches.setdefault(batch, _Batch())
        for shard in [shard for shard in found.watches if shard not in jobs]:
            self._drop(found, shard)
        if self._tasks is None:
            return
        for shard, job in jobs.items():
            known = found.watches.get(shard)
            if known is not None and known[0] == job.sandbox.metadata.uid:
                continue
            if known is not None:
                self._drop(found, shard)
            watch = self._tasks.create_task(
                self._watch(batch, found, shard, job), name=f"tasks of {batch} shard {shard}"
            )
            found.watches[shard] = (job.sandbox.metadata.uid, watch)

    def forget(self, batch: Key) -> None:
        """Follow nothing of a batch any more."""
        found = self._batches.pop(batch, None)
        if found is not None:
            for shard in tuple(found.watches):
                self._drop(found, shard)

    def _drop(self, found: _Batch, shard: int) -> None:
        found.watches.pop(shard)[1].cancel()
        found.reports.pop(shard, None)

    async def stop(self, sandbox: Sandbox, sandbox_id: str, *, seconds: float) -> bool:
        """End everything that runs in a sandbox; says whether it is known to have ended."""
        try:
            async with asyncio.timeout(STOP_SECONDS + seconds), self._gate:
                left = await self._runner.assign(sandbox, sandbox_id, ())
                if not left:
                    return True
                stream = cast("Any", self._runner.follow(sandbox, sandbox_id))
                async with aclosing(stream) as news:
                    async for reports in news:
                        if not reports:
                            return True
        except FAILURES as error:
            log.info(
                "tasks were not stopped",
                extra=fields(sandbox=sandbox.key, error=str(error) or type(error).__name__),
            )
        return False

    async def _watch(self, batch: Key, found: _Batch, shard: int, job: Job) -> None:
        failures = 0
        while True:
            try:
                async with self._gate:
                    reports = await self._runner.assign(job.sandbox, job.sandbox_id, (job.order,))
                failures = 0
                if self._heard(batch, found, shard, job, reports):
                    return
                stream = cast("Any", self._runner.follow(job.sandbox, job.sandbox_id))
                async with aclosing(stream) as news:
                    async for reports in news:
                        if self._heard(batch, found, shard, job, reports):
                            return
            except FAILURES as error:
                failures += 1
                self._unreachable(batch, found, shard, job, failures, error)
            failures = max(failures, 1)
            await asyncio.sleep(_BACKOFF.delay(failures))

    def _heard(
        self, batch: Key, found: _Batch, shard: int, job: Job, reports: tuple[Report, ...]
    ) -> bool:
        report = next((item for item in reports if item.name == job.order.name), None)
        if report is None:
            return False
        if found.reports.get(shard) != report:
            found.reports[shard] = report
            self._on_change(batch)
        return report.is_final

    def _unreachable(
        self, batch: Key, found: _Batch, shard: int, job: Job, failures: int, error: Exception
    ) -> None:
        message = str(error) or type(error).__name__
        log.debug("shard did not answer", extra=fields(batch=batch, shard=shard, error=message))
        last = found.reports.get(shard)
        if failures < 8 or (last is not None and last.state is TaskState.UNKNOWN):
            return
        attempt = last.attempt if last else job.order.first_attempt
        found.reports[shard] = Report(
            name=job.order.name,
            state=TaskState.UNKNOWN,
            attempt=attempt,
            reason="Unreachable",
            message=f"its sandbox does not answer: {message}",
            started_at=last.started_at if last else None,
        )
        self._on_change(batch)
