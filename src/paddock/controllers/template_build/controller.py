"""Performs the step that `plan` decides for one build. The steps of builds run in tasks."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from msgspec import structs

from paddock.builds.credentials import BuildCredentials
from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.controllers.retry_budget import RetryBudget
from paddock.controllers.template_build import plan as steps
from paddock.controllers.template_build.collection import BuildCollector
from paddock.controllers.template_build.ends import (
    BuildEnds,
    missing_template,
    unexpected,
)
from paddock.controllers.template_build.run import BuildRun, BuildTools, BuiltTemplate
from paddock.controllers.template_build.steps.runner import TRANSIENT, StepFailedError
from paddock.engine.controller import Done, Gone, RequeueAfter, Result
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import DiskFullError, NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.kit.tasks import cancel_and_wait
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import (
    FINALIZER_BUILD,
    BuildPhase,
    TemplateBuild,
)
from paddock.resources.meta import Key, with_meta

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
"""Longest wait before a build begins again at its last layer, after a failure of the machine."""


class TemplateBuildController:
    """Runs builds, cancels them and cleans up after them."""

    def __init__(
        self,
        provider: Provider,
        tools: BuildTools,
        collector: BuildCollector,
        credentials: BuildCredentials,
        clock: Clock,
        recorder: Recorder,
        *,
        concurrency: int = steps.DEFAULT_CONCURRENCY,
        max_seconds: float,
    ) -> None:
        self._provider = provider
        self._tools = tools
        self._collector = collector
        self._retry_budget = RetryBudget(clock)
        self._credentials = credentials
        self._clock = clock
        self._concurrency = concurrency
        self._max_seconds = max_seconds
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._beginning = asyncio.Lock()
        self._ends = BuildEnds(provider, tools.sandboxes, tools.logs, credentials, clock, recorder)

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs beside the workers, by name."""
        return {"template builds": self.run(), "old template builds": self._collector.run()}

    async def run(self) -> None:
        """Run the tasks of builds until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None
            self._runs.clear()

    async def reconcile(self, key: Key) -> Result:
        """Perform the next step for one build."""
        await self._tools.sandboxes.lost_replies.resolve()
        build = self._provider.get(TemplateBuild, key)
        if build is None:
            return Gone()
        now = self._clock.now()
        step = steps.plan(build, running=self._running(build), limit=self._concurrency, now=now)
        match step:
            case steps.Wait(until):
                return Done() if until is None else _at(until.timestamp() - now.timestamp())
            case steps.AddFinalizer():
                finalizers = (*build.metadata.finalizers, FINALIZER_BUILD)
                await self._provider.write.update(with_meta(build, finalizers=finalizers))
                return Done()
            case steps.Begin():
                return await self._begin(build)
            case steps.Run():
                return self._ensure_task(build)
            case steps.Fail(message):
                await self._stop(build)
                await self._ends.fail(build, StepFailedError(message))
                return Done(f"failed: {message}")
            case steps.Settle():
                await self._tools.sandboxes.delete_all(build)
                return Done()
            case _:
                return await self._clean_up(build)

    async def _begin(self, build: TemplateBuild) -> Result:
        """Record that a build begins, if its team still has room and its template exists."""
        key = Key(build.metadata.namespace, build.spec.template_name)
        is_known = self._provider.get(SandboxTemplate, key) is not None
        if not is_known and await self._provider.write.fetch(SandboxTemplate, key) is None:
            message = missing_template(build)
            await self._ends.fail(build, StepFailedError(message))
            return Done(f"failed: {message}")
        # One at a time: each counts those that began before.
        async with self._beginning:
            if self._running(build) >= self._concurrency:
                return Done()
            status = structs.replace(
                build.status,
                observed_generation=build.metadata.generation,
                phase=BuildPhase.BUILDING,
                start_time=self._clock.now(),
                message="",
            )
            await self._provider.write.update_status(structs.replace(build, status=status))
        return RequeueAfter(0.001, "begun")

    # ---- tasks ---------------------------------------------------------------------------

    def _running(self, build: TemplateBuild) -> int:
        """Return the number of other builds of the team that have begun."""
        return sum(
            1
            for other in self._provider.view(TemplateBuild, indexes.OPEN_BUILD, build.team)
            if other.status.phase is BuildPhase.BUILDING
            and other.metadata.uid != build.metadata.uid
            and not other.is_deleting
        )

    def _ensure_task(self, build: TemplateBuild) -> Result:
        uid = build.metadata.uid
        if self._tasks is None:
            return RequeueAfter(0.1, "the tasks of builds do not run yet")
        if uid not in self._runs:
            task = self._tasks.create_task(self._build(build), name=f"build {build.key}")
            self._runs[uid] = task
            task.add_done_callback(lambda _: self._forget(uid))
        return Done()

    def _forget(self, uid: str) -> None:
        self._runs.pop(uid, None)
        self._retry_budget.reset(uid)

    async def _stop(self, build: TemplateBuild) -> None:
        task = self._runs.get(build.metadata.uid)
        if task is not None:
            await cancel_and_wait(task)
        await self._tools.sandboxes.delete_all(build)

    async def _build(self, build: TemplateBuild) -> None:
        """Run a build to its end, and record it. An error of one build must not end others."""
        await self._ends.record(build, await self._outcome(build))

    async def _outcome(self, build: TemplateBuild) -> BuiltTemplate | PaddockError:
        """Return the result of a build, or why it failed. Failures of the machine are retried."""
        limit = asyncio.timeout(self._seconds_left(build))
        runs: list[BuildRun] = []
        try:
            async with limit:
                return await self._attempts(build, runs)
        except PaddockError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the root of a build: each becomes its reason
            is_late = limit.expired()
            late = StepFailedError("the build took longer than its limit")
            failure = late if is_late else unexpected(build, error)
        step = failure.step if isinstance(failure, StepFailedError) else ""
        return StepFailedError(failure.message, step=step or (runs[-1].step if runs else ""))

    async def _attempts(self, build: TemplateBuild, runs: list[BuildRun]) -> BuiltTemplate:
        """Try until it succeeds or must fail. The last one of `runs` is the current attempt."""
        attempt = 1
        while True:
            run = BuildRun(build, self._tools)
            runs[:] = [run]
            try:
                return await run.perform()
            except TRANSIENT as error:
                uid = build.metadata.uid
                if run.has_progressed:
                    self._retry_budget.reset(uid)
                    attempt = 1
                if isinstance(error, DiskFullError) or self._retry_budget.is_spent(uid):
                    raise
                log.warning(
                    "build begins again at its last layer",
                    extra=fields(build=str(build.key), error=error.message),
                )
                await asyncio.sleep(min(attempt, PAUSE_SECONDS))
            attempt += 1

    def _seconds_left(self, build: TemplateBuild) -> float:
        begun = build.status.start_time or self._clock.now()
        return max(self._max_seconds - (self._clock.now() - begun).total_seconds(), 0.0)

    async def _clean_up(self, build: TemplateBuild) -> Result:
        await self._stop(build)
        self._credentials.remove(build.metadata.uid)
        await self._tools.logs.remove(build.metadata.uid)
        left = tuple(name for name in build.metadata.finalizers if name != FINALIZER_BUILD)
        try:
            await self._provider.write.update(with_meta(build, finalizers=left))
        except NotFoundError:
            return Done()
        return Done("cleaned up")


def _at(seconds: float) -> RequeueAfter:
    return RequeueAfter(max(seconds, 0.001), "waits")
