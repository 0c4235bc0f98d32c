"""Decides the next step for one sandbox from its spec and its instance. Pure.

The controller performs the step and plans again. Each step can be repeated after a crash: the
runtime is idempotent by uid, and every store write carries a resource version.
"""

from datetime import datetime

from paddock.cache.states import is_resuming
from paddock.controllers.sandbox import hibernation_retry
from paddock.controllers.steps import AddFinalizer, Expire, Fail, Step, Wait
from paddock.resources.kinds.sandbox import CONDITION_READY, FINALIZER_SANDBOX, Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import is_true
from paddock.resources.transitions import deadlines
from paddock.resources.transitions.pause_strategy import strategy_of
from paddock.runtime.port import Instance, InstanceState


class Create(Step, frozen=True):
    """Create and start the instance."""


class Pause(Step, frozen=True):
    """Pause the instance with this strategy."""

    strategy: PauseStrategy


class HibernateFrozen(Step, frozen=True):
    """Hibernate a sandbox that was only frozen: requests waited for it, or hibernation failed."""


class Resume(Step, frozen=True):
    """Resume the instance."""

    strategy: PauseStrategy


class UpdateImage(Step, frozen=True):
    """Restart the sandbox in place with another image."""

    image: str


class RecordRunning(Step, frozen=True):
    """Write to the status that the instance runs."""


class AutoPause(Step, frozen=True):
    """Set `spec.paused`: pauseTime has passed."""


class Recycle(Step, frozen=True):
    """Reset the sandbox for its pool."""


class Destroy(Step, frozen=True):
    """Destroy the instance, then remove the finalizer."""


_FINISHED = (Phase.SUCCEEDED, Phase.FAILED)


def plan(sandbox: Sandbox, instance: Instance | None, *, now: datetime) -> Step:
    """Return the next step."""
    if sandbox.is_deleting:
        held = FINALIZER_SANDBOX in sandbox.metadata.finalizers
        return Destroy() if held else Wait(None, "deletion waits for other finalizers")
    if deadlines.is_over(sandbox.spec, now=now) and not is_resuming(sandbox):
        return Expire()
    if sandbox.status.phase in _FINISHED:
        return Wait(deadlines.next_instant(sandbox.spec), f"the sandbox is {sandbox.status.phase}")
    if FINALIZER_SANDBOX not in sandbox.metadata.finalizers:
        return AddFinalizer()
    return _advance(sandbox, instance, now)


def _advance(sandbox: Sandbox, instance: Instance | None, now: datetime) -> Step:
    if sandbox.spec.recycle and sandbox.status.phase is Phase.RECYCLING:
        # Between destroy and create there is no instance, or one that we stopped: not a failure.
        return Recycle()
    if instance is not None and instance.state is InstanceState.FAILED:
        return Fail(instance.reason or "the instance failed; the runtime reported no reason")
    if sandbox.status.phase is Phase.PENDING:
        return Create()
    if instance is None:
        return Fail("the instance no longer exists in the runtime")
    if sandbox.spec.recycle and sandbox.status.phase is Phase.RUNNING:
        return Recycle()
    if deadlines.is_pause_due(sandbox.spec, now=now):
        return AutoPause()
    if sandbox.spec.paused:
        return _towards_paused(sandbox, instance, now)
    return _towards_running(sandbox, instance)


def _towards_paused(sandbox: Sandbox, instance: Instance, now: datetime) -> Step:
    strategy = strategy_of(sandbox.spec)
    can_hibernate = hibernation_retry.is_due(sandbox.status, now=now)
    if sandbox.status.phase is Phase.PAUSED and instance.state in PAUSED_STRATEGIES:
        is_frozen = instance.state is InstanceState.FROZEN
        if not (strategy is PauseStrategy.HIBERNATE and is_frozen):
            # Perhaps paused with another strategy than the spec has now: keep it until it resumes.
            return Wait(deadlines.next_instant(sandbox.spec), "the sandbox is paused")
        if can_hibernate:
            return HibernateFrozen()
        return _wait_frozen(sandbox)
    if strategy is PauseStrategy.STOP:
        return Pause(strategy)
    if instance.state in (InstanceState.HIBERNATED, InstanceState.STOPPED):
        # Done by an attempt whose result was not recorded.
        return Pause(PAUSED_STRATEGIES[instance.state])
    if strategy is PauseStrategy.HIBERNATE and not can_hibernate:
        return Pause(PauseStrategy.FREEZE)
    return Pause(strategy)


def _wait_frozen(sandbox: Sandbox) -> Step:
    """Wait for the deadline of a sandbox that could not hibernate, or for the next attempt."""
    instants = (
        deadlines.next_instant(sandbox.spec),
        hibernation_retry.next_attempt(sandbox.status),
    )
    until = min((moment for moment in instants if moment is not None), default=None)
    return Wait(until, "the sandbox is frozen")


def _towards_running(sandbox: Sandbox, instance: Instance) -> Step:
    wanted = sandbox.spec.image
    if sandbox.status.phase is Phase.RUNNING and wanted is not None:
        is_there = instance.state is InstanceState.RUNNING and instance.image == wanted
        # Compare the status too: a pod has its new image before that image runs.
        if not is_there or sandbox.status.image != wanted:
            return UpdateImage(wanted)
    if instance.state is InstanceState.RUNNING:
        ready = is_true(sandbox.status.conditions, CONDITION_READY)
        current = sandbox.status.incarnation == instance.incarnation
        if sandbox.status.phase is Phase.RUNNING and ready and current:
            return Wait(deadlines.next_instant(sandbox.spec), "the sandbox runs")
        return RecordRunning()
    strategy = PAUSED_STRATEGIES.get(instance.state)
    return Create() if strategy is None else Resume(strategy)


PAUSED_STRATEGIES = {
    InstanceState.FROZEN: PauseStrategy.FREEZE,
    InstanceState.HIBERNATED: PauseStrategy.HIBERNATE,
    InstanceState.STOPPED: PauseStrategy.STOP,
}
"""The strategy by which an instance came into a state."""
