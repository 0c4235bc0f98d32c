"""What to do next with one checkpoint: a pure decision."""

from datetime import datetime, timedelta

from msgspec import Struct

from paddock.resources.kinds.checkpoint import (
    FINALIZER_CHECKPOINT,
    Checkpoint,
    CheckpointPhase,
    Content,
)
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy


class Step(Struct, frozen=True, tag=True):
    """Base of what can be done."""


class Rest(Step, frozen=True):
    """Nothing to do until `until` (or for good)."""

    until: datetime | None


class Protect(Step, frozen=True):
    """Add the finalizer, so that stored data cannot be forgotten."""


class Take(Step, frozen=True):
    """Store the state."""


class Fail(Step, frozen=True):
    """It cannot be stored."""

    message: str


class Expire(Step, frozen=True):
    """Its time is up: delete it."""


class Forget(Step, frozen=True):
    """Remove the stored data, then the finalizer."""


_STORABLE = (Phase.RUNNING, Phase.PAUSED)

# Files of a directory are applied in the order of their names, checkpoint.yaml before sandbox.yaml.
WAIT_FOR_SANDBOX = timedelta(minutes=1)


def plan(checkpoint: Checkpoint, sandbox: Sandbox | None, *, now: datetime) -> Step:
    """Decide the next step."""
    held = FINALIZER_CHECKPOINT in checkpoint.metadata.finalizers
    if checkpoint.is_deleting:
        return Forget() if held else Rest(None)
    if checkpoint.status.phase in (CheckpointPhase.SUCCEEDED, CheckpointPhase.FAILED):
        return _finished(checkpoint, now)
    if not held:
        return Protect()
    if sandbox is None and not checkpoint.spec.sandbox_uid:
        return _absent(checkpoint, now)
    return _storing(checkpoint, sandbox)


def _absent(checkpoint: Checkpoint, now: datetime) -> Step:
    end = (checkpoint.metadata.creation_timestamp or now) + WAIT_FOR_SANDBOX
    if now < end:
        return Rest(end)
    name, seconds = checkpoint.spec.sandbox_name, WAIT_FOR_SANDBOX.total_seconds()
    return Fail(f"sandbox {name!r} was not found within {seconds:.0f} seconds")


def _finished(checkpoint: Checkpoint, now: datetime) -> Step:
    ttl, finished = checkpoint.spec.ttl_seconds_after_finished, checkpoint.status.completion_time
    if ttl is None or finished is None:
        return Rest(None)
    end = finished + timedelta(seconds=ttl)
    return Expire() if end <= now else Rest(end)


def _storing(checkpoint: Checkpoint, sandbox: Sandbox | None) -> Step:
    name = checkpoint.spec.sandbox_name
    if sandbox is None or sandbox.is_deleting:
        return Fail(f"sandbox {name!r} was not found")
    fence = checkpoint.spec.sandbox_uid
    if fence and fence != sandbox.metadata.uid:
        return Fail(f"sandbox {name!r} is another one than was meant")
    if sandbox.status.phase is Phase.PENDING:
        return Rest(None)
    if sandbox.status.phase not in _STORABLE:
        return Fail(f"sandbox {name!r} is {sandbox.status.phase}; only a live one can be stored")
    stopped = sandbox.status.phase is Phase.PAUSED and (
        sandbox.status.pause_strategy is PauseStrategy.STOP
    )
    if stopped and Content.MEMORY in checkpoint.spec.persistent_contents:
        return Fail(f"sandbox {name!r} was stopped and has no memory to store; store its files")
    return Take()
