"""Records how builds ended. What cannot be written for now is written later."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import structs

from paddock.builds.credentials import BuildCredentials
from paddock.builds.logs import BuildLogs
from paddock.cache.provider import Provider
from paddock.controllers.template_build.run import BuiltTemplate
from paddock.controllers.template_build.sandboxes import BuildSandboxes
from paddock.controllers.template_build.steps.runner import TRANSIENT, StepFailedError
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.kit.tasks import cancel_and_wait
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import (
    REASON_BASE,
    REASON_FINALIZE,
    BuildPhase,
    TemplateBuild,
)
from paddock.resources.meta import Key
from paddock.resources.transitions.template_build import (
    is_default,
    with_build,
    with_build_status,
)
from paddock.resources.transitions.template_tags import is_superseded

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
"""Longest wait before a failed write is repeated."""
FINISH_SECONDS = 10.0
"""How long a canceled build may take to finish the writes of its result."""


class BuildEnds:
    """Writes results and failures of builds."""

    def __init__(
        self,
        provider: Provider,
        sandboxes: BuildSandboxes,
        logs: BuildLogs,
        credentials: BuildCredentials,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._provider = provider
        self._sandboxes = sandboxes
        self._logs = logs
        self._credentials = credentials
        self._clock = clock
        self._recorder = recorder

    async def record(self, build: TemplateBuild, outcome: BuiltTemplate | PaddockError) -> None:
        """Record the outcome of a build. Raises no error: writes are repeated until they succeed.

        A result that cannot be written, as its template was deleted, fails the build.
        """
        if isinstance(outcome, BuiltTemplate):
            failure = await self._record_result(build, outcome)
            if failure is None:
                return
            outcome = failure
        await self._repeated(build, lambda: self._sandboxes.delete_all(build))
        self._log_failure(build, outcome)
        await self._repeated(build, lambda: self._write_failure(build, outcome))

    async def fail(self, build: TemplateBuild, error: PaddockError) -> None:
        """Record that a build failed, unless it has ended."""
        current = self._provider.get(TemplateBuild, build.key)
        if current is None or current.has_ended:
            return
        self._log_failure(build, error)
        await self._write_failure(build, error)

    async def _record_result(
        self, build: TemplateBuild, result: BuiltTemplate
    ) -> PaddockError | None:
        """Record a result; return the error if it cannot be recorded."""
        try:
            await self._repeated(build, lambda: self._succeed(build, result), TRANSIENT)
        except PaddockError as error:
            return error
        except Exception as error:  # noqa: BLE001 - it becomes the reason of the build
            return unexpected(build, error)
        return None

    async def _repeated(
        self,
        build: TemplateBuild,
        work: Callable[[], Awaitable[None]],
        errors: tuple[type[Exception], ...] = (Exception,),
    ) -> None:
        """Do work; repeat it after these errors."""
        attempt = 1
        while True:
            try:
                return await work()
            except errors as error:
                log.warning(
                    "the end of a build was not written and is written again",
                    extra=fields(build=str(build.key), error=repr(error)),
                )
            await asyncio.sleep(min(attempt, PAUSE_SECONDS))
            attempt += 1

    # ---- results -------------------------------------------------------------------------

    async def _succeed(self, build: TemplateBuild, result: BuiltTemplate) -> None:
        await self._sandboxes.delete_all(build)
        # A cancellation between the two writes would leave a template of a failed build.
        await _uninterrupted(self._write_result(build, result))
        self._credentials.remove(build.metadata.uid)
        count = len(build.spec.steps)
        self._recorder.normal(build, "BuildReady", f"{result.cached_steps} of {count} steps cached")

    async def _write_result(self, build: TemplateBuild, result: BuiltTemplate) -> None:
        def ready(current: TemplateBuild) -> TemplateBuild:
            return self._ready(current, result)

        if is_default(build):
            # First the template: a client that sees the build ready may use it at once.
            await self._apply(ready(build))
        try:
            await self._provider.write.mutate(
                TemplateBuild, build.key, ready, uid=build.metadata.uid, is_status=True
            )
        except NotFoundError:
            return  # It was deleted.

    def _ready(self, build: TemplateBuild, result: BuiltTemplate) -> TemplateBuild:
        stored = result.checkpoint
        status = structs.replace(
            build.status,
            observed_generation=build.metadata.generation,
            phase=BuildPhase.READY,
            step=len(build.spec.steps),
            cached_steps=result.cached_steps,
            image_digest=result.digest,
            checkpoint_id=stored.status.checkpoint_id if stored else "",
            template=result.template,
            size_bytes=stored.status.size_bytes if stored else 0,
            completion_time=self._clock.now(),
        )
        return structs.replace(build, status=status)

    async def _apply(self, built: TemplateBuild) -> None:
        """Write the result to the template, so that its pools roll.

        Not if the template was rolled back or built again in the meantime.
        """
        write = self._provider.write
        key = Key(built.metadata.namespace, built.spec.template_name)

        def is_old(template: SandboxTemplate) -> bool:
            builds = self._provider.builds_of_template(key)
            return is_superseded(template.status.tags, built, builds)

        def applied(template: SandboxTemplate) -> SandboxTemplate | None:
            return None if is_old(template) else with_build(template, built)

        def recorded(template: SandboxTemplate) -> SandboxTemplate | None:
            return None if is_old(template) else with_build_status(template, built)

        try:
            await write.mutate(SandboxTemplate, key, applied)
            await write.mutate(SandboxTemplate, key, recorded, is_status=True)
        except NotFoundError as error:
            raise StepFailedError(missing_template(built), step=REASON_FINALIZE) from error

    # ---- failures ------------------------------------------------------------------------

    def _log_failure(self, build: TemplateBuild, error: PaddockError) -> None:
        self._logs.append(build.metadata.uid, error.message, level="error", step=_step_of(error))

    async def _write_failure(self, build: TemplateBuild, error: PaddockError) -> None:
        def failed(current: TemplateBuild) -> TemplateBuild | None:
            if current.has_ended:
                return None
            status = structs.replace(
                current.status,
                observed_generation=current.metadata.generation,
                phase=BuildPhase.FAILED,
                message=error.message,
                failed_step=_step_of(error),
                completion_time=self._clock.now(),
            )
            return structs.replace(current, status=status)

        try:
            await self._provider.write.mutate(
                TemplateBuild, build.key, failed, uid=build.metadata.uid, is_status=True
            )
        except NotFoundError:
            return  # It was deleted.
        self._credentials.remove(build.metadata.uid)
        self._recorder.warning(build, "BuildFailed", _failure(build, error))


def missing_template(build: TemplateBuild) -> str:
    """Return the message for a build whose template does not exist."""
    name = build.spec.template_name
    return f"template {name!r} of the build does not exist: create the SandboxTemplate {name!r}"


def unexpected(build: TemplateBuild, error: Exception) -> PaddockError:
    """Log an error that nobody expected, and return what the build fails with."""
    log.error("build failed unexpectedly", extra=fields(build=str(build.key)), exc_info=error)
    return StepFailedError(f"internal error: {type(error).__name__}")


def _step_of(error: PaddockError) -> str:
    return (error.step if isinstance(error, StepFailedError) else "") or REASON_BASE


def _failure(build: TemplateBuild, error: PaddockError) -> str:
    """Return the message of the event. Readers see it: it quotes nothing of the step."""
    step = _step_of(error)
    kind = f" ({build.spec.steps[int(step) - 1].type})" if step.isdigit() else ""
    where = f"step {step}{kind}" if kind else step
    return f"failed at {where}; see status.message and the log of the build"


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Do work to its end even if the task is cancelled meanwhile."""
    task = asyncio.create_task(work, name="result of a build")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,), timeout=FINISH_SECONDS)
        await cancel_and_wait(task)
        raise
