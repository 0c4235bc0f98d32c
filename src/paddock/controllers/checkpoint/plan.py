"""Decides the next step for one checkpoint. Pure."""

from datetime import datetime, timedelta

from paddock.controllers.steps import AddFinalizer, Expire, Fail, Step, Wait
from paddock.resources.kinds.checkpoint import (
    FINALIZER_CHECKPOINT,
    Checkpoint,
    CheckpointPhase,
    Content,
)
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy


class TakeSnapshot(Step, frozen=True):
    """Store the sandbox's state."""


class DeleteData(Step, frozen=True):
    """Delete the stored data, then remove the finalizer."""


_STORABLE = (Phase.RUNNING, Phase.PAUSED)

# kubectl applies a directory in file order: checkpoint.yaml comes before sandbox.yaml.
WAIT_FOR_SANDBOX = timedelta(minutes=1)


class KeepInUse(Step, frozen=True):
    """Keep the data of a deleted checkpoint: a template starts sandboxes from it."""

    template: str


def plan(
    checkpoint: Checkpoint, sandbox: Sandbox | None, *, now: datetime, used_by: str = ""
) -> Step:
    """Return the next step. `used_by` is a template that starts sandboxes from the checkpoint."""
    held = FINALIZER_CHECKPOINT in checkpoint.metadata.finalizers
    if checkpoint.is_deleting:
        if held and used_by:
            return KeepInUse(used_by)
        return DeleteData() if held else Wait(None)
    if checkpoint.status.phase in (CheckpointPhase.SUCCEEDED, CheckpointPhase.FAILED):
        return _finished(checkpoint, now)
    if not held:
        return AddFinalizer()
    if sandbox is None and not checkpoint.spec.sandbox_uid:
        return _without_sandbox(checkpoint, now)
    return _with_sandbox(checkpoint, sandbox)


def _without_sandbox(checkpoint: Checkpoint, now: datetime) -> Step:
    end = (checkpoint.metadata.creation_timestamp or now) + WAIT_FOR_SANDBOX
    if now < end:
        return Wait(end)
    name, seconds = checkpoint.spec.sandbox_name, WAIT_FOR_SANDBOX.total_seconds()
    return Fail(f"sandbox {name!r} was not found within {seconds:.0f} seconds")


def _finished(checkpoint: Checkpoint, now: datetime) -> Step:
    ttl, finished = checkpoint.spec.ttl_seconds_after_finished, checkpoint.status.completion_time
    if ttl is None or finished is None:
        return Wait(None)
    end = finished + timedelta(seconds=ttl)
    return Expire() if end <= now else Wait(end)


def _with_sandbox(checkpoint: Checkpoint, sandbox: Sandbox | None) -> Step:
    name = checkpoint.spec.sandbox_name
    if sandbox is None or sandbox.is_deleting:
        return Fail(f"sandbox {name!r} was not found")
    fence = checkpoint.spec.sandbox_uid
    if fence and fence != sandbox.metadata.uid:
        return Fail(f"sandbox {name!r} has another uid than spec.sandboxUid: it was recreated")
    if sandbox.status.phase is Phase.PENDING:
        return Wait(None)
    if sandbox.status.phase not in _STORABLE:
        return Fail(f"sandbox {name!r} is {sandbox.status.phase}; it must be running or paused")
    stopped = sandbox.status.phase is Phase.PAUSED and (
        sandbox.status.pause_strategy is PauseStrategy.STOP
    )
    if stopped and Content.MEMORY in checkpoint.spec.persistent_contents:
        return Fail(
            f"sandbox {name!r} was stopped and has no memory; remove memory from persistentContents"
        )
    return TakeSnapshot()
