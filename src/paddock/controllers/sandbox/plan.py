"""What to do next with one sandbox: a pure decision over what is wanted and what is.

The controller performs the step and comes back; each step is safe to perform again after a
crash, because the runtime is idempotent by uid and every store write names its version.
"""

from datetime import datetime

from msgspec import Struct

from paddock.cache.states import is_resuming
from paddock.resources.kinds.sandbox import CONDITION_READY, FINALIZER_SANDBOX, Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import is_true
from paddock.resources.transitions import deadlines
from paddock.runtime.port import Instance, InstanceState


class Step(Struct, frozen=True, tag=True):
    """Base of what can be done."""


class Rest(Step, frozen=True):
    """Nothing to do until `until` (or for good)."""

    until: datetime | None
    because: str


class Protect(Step, frozen=True):
    """Add the finalizer, so that nothing the runtime makes can be forgotten."""


class Create(Step, frozen=True):
    """Make it."""


class Pause(Step, frozen=True):
    """Stop it in this manner."""

    strategy: PauseStrategy


class Resume(Step, frozen=True):
    """Let it go on."""

    strategy: PauseStrategy


class UpdateImage(Step, frozen=True):
    """Start it anew from another image, in place."""

    image: str


class RecordRunning(Step, frozen=True):
    """It runs; say so."""


class Fail(Step, frozen=True):
    """It is over without having been asked to."""

    message: str


class AutoPause(Step, frozen=True):
    """Its pauseTime has come: set the flag."""


class Expire(Step, frozen=True):
    """Its shutdownTime has come: delete it."""


class Recycle(Step, frozen=True):
    """Reset it for its pool."""


class Destroy(Step, frozen=True):
    """Remove every trace, then the finalizer."""


_OVER = (Phase.SUCCEEDED, Phase.FAILED)


def plan(sandbox: Sandbox, instance: Instance | None, *, now: datetime) -> Step:
    """Decide the next step."""
    if sandbox.is_deleting:
        held = FINALIZER_SANDBOX in sandbox.metadata.finalizers
        return Destroy() if held else Rest(None, "deletion waits for others")
    if deadlines.is_over(sandbox.spec, now=now) and not is_resuming(sandbox):
        return Expire()
    if sandbox.status.phase in _OVER:
        return Rest(deadlines.next_instant(sandbox.spec), f"it is {sandbox.status.phase}")
    if FINALIZER_SANDBOX not in sandbox.metadata.finalizers:
        return Protect()
    return _advance(sandbox, instance, now)


def _advance(sandbox: Sandbox, instance: Instance | None, now: datetime) -> Step:
    if sandbox.spec.recycle and sandbox.status.phase is Phase.RECYCLING:
        # Between its two lives the runtime knows nothing of it, or of an end that we asked for.
        return Recycle()
    if instance is not None and instance.state is InstanceState.FAILED:
        return Fail(instance.reason or "the runtime gave no reason")
    if sandbox.status.phase is Phase.PENDING:
        return Create()
    if instance is None:
        return Fail("the runtime no longer knows it")
    if sandbox.spec.recycle and sandbox.status.phase is Phase.RUNNING:
        return Recycle()
    if deadlines.is_pause_due(sandbox.spec, now=now):
        return AutoPause()
    if sandbox.spec.paused:
        return _towards_paused(sandbox, instance)
    return _towards_running(sandbox, instance)


def _towards_paused(sandbox: Sandbox, instance: Instance) -> Step:
    strategy = pause_strategy(sandbox)
    if sandbox.status.phase is Phase.PAUSED and instance.state is _RESTING[strategy]:
        return Rest(deadlines.next_instant(sandbox.spec), "it is paused")
    if sandbox.status.phase is Phase.PAUSED and instance.state in _RESTING.values():
        # Paused in another manner than is now asked for: it stays as it is until it runs again.
        return Rest(deadlines.next_instant(sandbox.spec), "it is paused")
    return Pause(strategy)


def _towards_running(sandbox: Sandbox, instance: Instance) -> Step:
    wanted = sandbox.spec.image
    if sandbox.status.phase is Phase.RUNNING and wanted is not None:
        is_there = instance.state is InstanceState.RUNNING and instance.image == wanted
        # The status says when it was ready: a pod has its new image before that runs.
        if not is_there or sandbox.status.image != wanted:
            return UpdateImage(wanted)
    if instance.state is InstanceState.RUNNING:
        ready = is_true(sandbox.status.conditions, CONDITION_READY)
        current = sandbox.status.incarnation == instance.incarnation
        if sandbox.status.phase is Phase.RUNNING and ready and current:
            return Rest(deadlines.next_instant(sandbox.spec), "it runs")
        return RecordRunning()
    for strategy, state in _RESTING.items():
        if instance.state is state:
            return Resume(strategy)
    return Create()


_RESTING = {
    PauseStrategy.FREEZE: InstanceState.FROZEN,
    PauseStrategy.HIBERNATE: InstanceState.HIBERNATED,
    PauseStrategy.STOP: InstanceState.STOPPED,
}


def pause_strategy(sandbox: Sandbox) -> PauseStrategy:
    """Say how this sandbox is to be paused; the template's wish is resolved into the spec early."""
    if sandbox.spec.pause_strategy is not None:
        return sandbox.spec.pause_strategy
    if sandbox.spec.template is not None:
        return sandbox.spec.template.pause_strategy
    return PauseStrategy.FREEZE
