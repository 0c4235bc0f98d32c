"""The conditions of wait tasks: pure, one function per action.

A check gets the object and the time. It returns `None` when the condition holds, or a text that
names what is missing. It raises when the condition can never hold.
"""

from datetime import datetime

from paddock.cache import states
from paddock.kit.errors import (
    ConflictError,
    DiskFullError,
    NotFoundError,
    PaddockError,
    QuotaExceededError,
    UnavailableError,
    UnstorableError,
    UnsupportedError,
)
from paddock.resources.kinds.checkpoint import (
    REASON_NO_SPACE,
    REASON_QUOTA,
    REASON_UNSTORABLE,
    REASON_UNSUPPORTED,
    Checkpoint,
    CheckpointPhase,
)
from paddock.resources.kinds.sandbox import CONDITION_PAUSED, CONDITION_READY, Phase, Sandbox
from paddock.resources.meta import Condition, ConditionStatus, Resource, condition

FREE_STORED_BYTES = (
    "delete snapshots or hibernated sandboxes, or ask an administrator to raise the quota"
)
FREE_DISK_SPACE = "delete snapshots or sandboxes, or ask the operator to free disk space"

REASON_PAUSE_FAILED = "PauseFailed"
"""On the condition Paused (False): the runtime could not pause it, and it keeps running."""
REASON_PAUSE_UNSUPPORTED = "PauseUnsupported"
"""The same, where the runtime cannot pause at all: retrying does not help."""
PAUSE_REFUSALS = frozenset({REASON_PAUSE_FAILED, REASON_PAUSE_UNSUPPORTED})
REASON_RESUME_FAILED = "ResumeFailed"
"""On the condition Ready (False): the runtime could not resume it."""


def paused(sandbox: Sandbox, now: datetime) -> str | None:
    """Wait for the pause to be complete."""
    _refuse_dead(sandbox, now, "paused")
    failed = _failure(sandbox, CONDITION_PAUSED, PAUSE_REFUSALS)
    if not sandbox.spec.paused:
        # Clearing the flag after a failure makes one more generation.
        if failed is not None and failed.observed_generation >= sandbox.metadata.generation - 1:
            raise _failed(sandbox, failed, "could not be paused")
        raise ConflictError(
            f"sandbox {sandbox.key} was resumed while it was being paused",
            hint="pause it again if that is still wanted",
        )
    if states.is_fully_paused(sandbox):
        return None
    if failed is not None and failed.observed_generation >= sandbox.metadata.generation:
        # The caller must see a running sandbox with the failure: the flag is cleared first.
        return "its pause failed, and it is being set running again"
    return f"its phase is {sandbox.status.phase}"


def resumed(sandbox: Sandbox, now: datetime) -> str | None:
    """Wait until it runs and is ready again."""
    _refuse_dead(sandbox, now, "resumed")
    if sandbox.spec.paused:
        raise ConflictError(
            f"sandbox {sandbox.key} was paused while it was being resumed",
            hint="resume it again if that is still wanted",
        )
    failed = _failure(sandbox, CONDITION_READY, frozenset({REASON_RESUME_FAILED}))
    if failed is not None and failed.observed_generation >= sandbox.metadata.generation:
        raise _failed(sandbox, failed, "could not be resumed")
    return _missing_to_ready(sandbox)


def ready(sandbox: Sandbox, now: datetime) -> str | None:
    """Wait until it runs and is ready."""
    _refuse_dead(sandbox, now, "ready")
    if sandbox.spec.paused:
        raise ConflictError(
            f"sandbox {sandbox.key} is paused, so it does not become ready", hint="resume it first"
        )
    if sandbox.spec.image is not None and sandbox.status.image != sandbox.spec.image:
        return _missing_to_ready(sandbox) or f"image {sandbox.spec.image} is being started"
    return _missing_to_ready(sandbox)


def checkpointed(checkpoint: Checkpoint, now: datetime) -> str | None:
    """Wait until the state is stored."""
    status = checkpoint.status
    if checkpoint.is_deleting or status.phase is CheckpointPhase.TERMINATING:
        raise NotFoundError(f"checkpoint {checkpoint.key} was deleted before it was complete")
    if status.phase is CheckpointPhase.FAILED:
        why = status.message or "no reason was recorded"
        ready = condition(status.conditions, CONDITION_READY)
        if ready is not None and ready.reason == REASON_UNSUPPORTED:
            raise UnsupportedError(f"no snapshot of this sandbox can be made: {why}")
        if ready is not None and ready.reason == REASON_QUOTA:
            raise QuotaExceededError(why, hint=FREE_STORED_BYTES)
        if ready is not None and ready.reason == REASON_NO_SPACE:
            raise DiskFullError(why, hint=FREE_DISK_SPACE)
        if ready is not None and ready.reason == REASON_UNSTORABLE:
            raise UnstorableError(why)
        raise UnavailableError(f"checkpoint {checkpoint.key} failed: {why}")
    if status.phase is CheckpointPhase.SUCCEEDED and status.checkpoint_id:
        return None
    return f"its phase is {status.phase}"


def deleted(obj: Resource, now: datetime) -> str | None:
    """Wait until it is deleted: as long as it can be read, it is not."""
    if obj.metadata.finalizers:
        return "it is held by " + ", ".join(obj.metadata.finalizers)
    return "it still exists"


def _missing_to_ready(sandbox: Sandbox) -> str | None:
    if states.is_ready(sandbox):
        return None
    if sandbox.status.phase is not Phase.RUNNING:
        detail = f": {sandbox.status.message}" if sandbox.status.message else ""
        return f"its phase is {sandbox.status.phase}{detail}"
    found = condition(sandbox.status.conditions, CONDITION_READY)
    if found is None:
        return "it has not reported its readiness yet"
    return f"it is not ready: {found.message or found.reason}"


def _refuse_dead(sandbox: Sandbox, now: datetime, wanted: str) -> None:
    reason = states.end_reason(sandbox, now)
    if not reason:
        return
    if sandbox.is_deleting or sandbox.status.phase is Phase.TERMINATING:
        raise NotFoundError(f"sandbox {sandbox.key} was deleted before it was {wanted}")
    if _failure(sandbox, CONDITION_READY, frozenset({REASON_NO_SPACE})) is not None:
        raise DiskFullError(sandbox.status.message, hint=FREE_DISK_SPACE)
    detail = f": {sandbox.status.message}" if sandbox.status.message else ""
    raise ConflictError(
        f"sandbox {sandbox.key} has ended ({reason}), so it cannot be {wanted}{detail}"
    )


def _failure(sandbox: Sandbox, kind: str, reasons: frozenset[str]) -> Condition | None:
    """Return a recorded failure. The caller compares its generation with this attempt's."""
    found = condition(sandbox.status.conditions, kind)
    if found is None or found.reason not in reasons or found.status is ConditionStatus.TRUE:
        return None
    return found


def _failed(sandbox: Sandbox, found: Condition, what: str) -> PaddockError:
    text = f"sandbox {sandbox.key} {what}: {found.message or 'no reason given'}"
    if found.reason == REASON_PAUSE_UNSUPPORTED:
        return UnsupportedError(text)
    return UnavailableError(text)
