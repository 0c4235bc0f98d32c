"""Pauses sandboxes, and decides what happens if one cannot be paused.

A sandbox that cannot hibernate is frozen instead. Until it is paused, it runs and counts as
running. A pause that fails grants no time: the deadlines from before the pause apply again. If one
has passed, the sandbox is stopped or ends.
"""

from collections.abc import Awaitable, Callable

from msgspec import structs

from paddock.cache.checks import REASON_PAUSE_FAILED, REASON_PAUSE_UNSUPPORTED
from paddock.cache.writes import Writer
from paddock.controllers.retry_budget import RetryBudget
from paddock.controllers.sandbox import hibernation_retry
from paddock.controllers.sandbox import plan as steps
from paddock.controllers.sandbox.lifecycle import Trigger, move
from paddock.controllers.sandbox.status import moved, runnable_again, with_condition
from paddock.controllers.sandbox.waiting_requests import WaitingRequests
from paddock.controllers.sandbox.while_paused import WhilePaused
from paddock.engine.controller import Done, RequeueAfter, Result
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    NotFoundError,
    PaddockError,
    UnstorableError,
    UnsupportedError,
)
from paddock.resources.kinds.sandbox import (
    CONDITION_PAUSED,
    CONDITION_STORABLE,
    Phase,
    Sandbox,
    SandboxStatus,
)
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import condition
from paddock.resources.transitions import deadlines
from paddock.runtime.port import Instance, InstanceState, Runtime

REASON_NOT_HIBERNATED = "HibernationFailed"
"""Reason of the event, and of the condition Storable (False), after a failed hibernation."""
REASON_UNSTORABLE = "Unstorable"
"""The same, if the sandbox has something that cannot be stored."""
REASON_STORED = "Hibernated"
REASON_STOPPED = "PausedWithoutMemory"
"""Reason of the event of a sandbox that is stopped at its deadline."""
REASON_ENDED = "EndedAtTimeout"
"""Reason of the event of a sandbox that ends at its deadline because it cannot be paused."""
CHECK_REQUESTS_SECONDS = 0.5
"""How often a frozen sandbox with waiting requests is checked. They wake it within milliseconds,
unless waking fails."""

Announce = Callable[[Sandbox, Phase, Trigger], Awaitable[Sandbox]]
"""Writes the phase of a slow transition when it begins."""


class Pauses:
    """Performs the steps of pausing."""

    def __init__(
        self,
        *,
        write: Writer,
        runtime: Runtime,
        clock: Clock,
        recorder: Recorder,
        requests: WaitingRequests,
        announce: Announce,
        while_paused: WhilePaused,
    ) -> None:
        self._write = write
        self._runtime = runtime
        self._clock = clock
        self._recorder = recorder
        self._requests = requests
        self._announce = announce
        self._while_paused = while_paused
        self._retry_budget = RetryBudget(clock)

    async def pause(self, sandbox: Sandbox, step: steps.Pause, _: Instance | None) -> Result:
        """Pause the sandbox, or record why not."""
        strategy = step.strategy
        uid = sandbox.metadata.uid
        current = sandbox
        try:
            if strategy is not PauseStrategy.FREEZE:
                current = await self._announce(sandbox, Phase.RUNNING, Trigger.PAUSE_BEGAN)
            if strategy is PauseStrategy.HIBERNATE and await self._is_waited_for(current):
                strategy = PauseStrategy.FREEZE
            instance = await self._pause_instance(uid, strategy)
            if strategy is PauseStrategy.HIBERNATE and instance.state is InstanceState.FROZEN:
                strategy = PauseStrategy.FREEZE  # until its turn to be stored
        except UnsupportedError as error:
            return await self._refuse(current, error)
        except (ConflictError, NotFoundError):
            raise
        except PaddockError as error:
            can_freeze = (await self._runtime.capabilities()).can_freeze
            if strategy is PauseStrategy.HIBERNATE and can_freeze:
                await self._record_failure(current, error)
                return RequeueAfter(0.001, "it is frozen instead")
            if not isinstance(error, UnstorableError) and not self._retry_budget.is_spent(uid):
                raise
            return await self._refuse(current, error)
        self._retry_budget.reset(uid)
        return await self._record_paused(current, strategy, instance)

    async def hibernate_frozen(
        self, sandbox: Sandbox, _step: steps.Step, _instance: Instance | None
    ) -> Result:
        """Hibernate a frozen sandbox; if that fails, it stays frozen.

        It may wait for its turn. A resume or deletion meanwhile ends the attempt.
        """
        if await self._requests.has_requests(sandbox):
            return RequeueAfter(CHECK_REQUESTS_SECONDS, "requests wait for the frozen sandbox")
        try:
            hibernating = self._runtime.hibernate(sandbox.metadata.uid)
            instance = await self._while_paused.run(sandbox, hibernating)
        except (ConflictError, NotFoundError):
            raise
        except PaddockError as error:
            await self._record_failure(sandbox, error)
            return RequeueAfter(0.001, "it stays frozen")
        if instance is None:
            return RequeueAfter(0.001, "it is no longer to be paused")
        status = self._stored(sandbox, self._moved(sandbox, None, instance))
        status = structs.replace(status, pause_strategy=PauseStrategy.HIBERNATE)
        await self._write.update_status(structs.replace(sandbox, status=status))
        return RequeueAfter(0.001, "hibernated")

    def forget(self, uid: str) -> None:
        """Forget a sandbox that is destroyed."""
        self._retry_budget.reset(uid)

    async def _pause_instance(self, uid: str, strategy: PauseStrategy) -> Instance:
        if strategy is PauseStrategy.FREEZE:
            return await self._runtime.freeze(uid)
        if strategy is PauseStrategy.STOP:
            return await self._runtime.stop(uid)
        return await self._runtime.hibernate(uid)

    async def _is_waited_for(self, sandbox: Sandbox) -> bool:
        """Whether requests in flight wake the sandbox as soon as it is paused."""
        capabilities = await self._runtime.capabilities()
        if not (capabilities.can_freeze and capabilities.can_checkpoint):
            return False
        return await self._requests.has_requests(sandbox)

    async def _record_paused(
        self, sandbox: Sandbox, strategy: PauseStrategy, instance: Instance
    ) -> Result:
        status = self._moved(sandbox, Trigger.PAUSED, instance)
        status = structs.replace(status, pause_strategy=strategy, paused_at=self._clock.now())
        if strategy is PauseStrategy.HIBERNATE:
            status = self._stored(sandbox, status)
        await self._write.update_status(structs.replace(sandbox, status=status))
        return RequeueAfter(0.001, f"paused: {strategy}")

    # ---- failures ------------------------------------------------------------------------

    async def _record_failure(self, sandbox: Sandbox, error: PaddockError) -> Sandbox:
        """Count a failed hibernation, and report it in a condition and an event."""
        now = self._clock.now()
        failures = hibernation_retry.after_failure(sandbox.status, error, now=now)
        text = hibernation_retry.describe(failures)
        self._recorder.warning(sandbox, REASON_NOT_HIBERNATED, text)
        is_unstorable = isinstance(error, UnstorableError)
        reason = REASON_UNSTORABLE if is_unstorable else REASON_NOT_HIBERNATED
        conditions = with_condition(
            sandbox, CONDITION_STORABLE, holds=False, reason=reason, text=text, now=now
        )
        status = structs.replace(
            sandbox.status, hibernation_failures=failures, conditions=conditions
        )
        return await self._write.update_status(structs.replace(sandbox, status=status))

    def _stored(self, sandbox: Sandbox, status: SandboxStatus) -> SandboxStatus:
        """Return the status without the failures of hibernation."""
        if condition(status.conditions, CONDITION_STORABLE) is None:
            return structs.replace(status, hibernation_failures=None)
        conditions = with_condition(
            structs.replace(sandbox, status=status),
            CONDITION_STORABLE,
            holds=True,
            reason=REASON_STORED,
            now=self._clock.now(),
        )
        return structs.replace(status, hibernation_failures=None, conditions=conditions)

    async def _refuse(self, sandbox: Sandbox, error: PaddockError) -> Result:
        """Keep the sandbox running until its deadline; if that has passed, stop or end it."""
        now = self._clock.now()
        spec = deadlines.with_failed_pause(sandbox.spec, now=now)
        if deadlines.is_pause_due(spec, now=now):
            instance = await self._paused_otherwise(sandbox, error)
            if instance is not None:
                strategy = steps.PAUSED_STRATEGIES[instance.state]
                self._retry_budget.reset(sandbox.metadata.uid)
                return await self._record_paused(sandbox, strategy, instance)
            self._recorder.warning(
                sandbox, REASON_ENDED, f"its timeout has ended, and no pause works: {error.advice}"
            )
            spec = structs.replace(spec, pause_time=None, shutdown_time=now)
        is_unsupported = isinstance(error, UnsupportedError)
        reason = REASON_PAUSE_UNSUPPORTED if is_unsupported else REASON_PAUSE_FAILED
        self._recorder.warning(sandbox, reason, error.advice)
        conditions = with_condition(
            sandbox, CONDITION_PAUSED, holds=False, reason=reason, text=error.advice, now=now
        )
        # The condition is written first: a client that waits for the pause then sees the reason.
        status = structs.replace(
            runnable_again(sandbox.status),
            phase=move(sandbox.status.phase, Trigger.PAUSE_FAILED),
            message=error.advice,
            conditions=conditions,
        )
        written = await self._write.update_status(structs.replace(sandbox, status=status))
        self._retry_budget.reset(sandbox.metadata.uid)
        await self._write.update(structs.replace(written, spec=spec))
        return Done("pause refused")

    async def _paused_otherwise(self, sandbox: Sandbox, error: PaddockError) -> Instance | None:
        """Pause a sandbox whose timeout has ended in any way that works: frozen, else stopped.

        Errors that may pass are raised, and it is tried again: a node that is down loses no file.
        """
        capabilities = await self._runtime.capabilities()
        uid = sandbox.metadata.uid
        if capabilities.can_freeze and isinstance(error, UnsupportedError):
            try:
                return await self._runtime.freeze(uid)
            except PaddockError:
                if not self._retry_budget.is_spent(uid):
                    raise
        if not capabilities.can_stop:
            return None
        try:
            instance = await self._runtime.stop(uid)
        except UnsupportedError:
            return None
        self._recorder.warning(
            sandbox, REASON_STOPPED, f"stopped at its timeout, only files are kept: {error.message}"
        )
        return instance

    def _moved(
        self, sandbox: Sandbox, trigger: Trigger | None, instance: Instance | None
    ) -> SandboxStatus:
        runtime = self._runtime.name
        return moved(sandbox, trigger, instance, runtime=runtime, now=self._clock.now())
