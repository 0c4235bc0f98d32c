"""The state of a sandbox as APIs, routes and pools see it: computed, never stored.

Pure functions of a Sandbox and the time. The phase is what the controller recorded; a state
also knows flags and deadlines: what is past its shutdownTime is dead at once, though its
processes may still be ending. Waiting for a state is `waits`' business.
"""

from datetime import datetime
from enum import StrEnum

from msgspec import Struct

from paddock.resources.kinds.sandbox import (
    CONDITION_PAUSED,
    CONDITION_READY,
    LABEL_POOL,
    Phase,
    Sandbox,
)
from paddock.resources.meta import ConditionStatus, condition, is_true
from paddock.resources.transitions import deadlines


class SandboxState(StrEnum):
    """What a sandbox is, for those outside."""

    CREATING = "creating"
    """In the making."""
    AVAILABLE = "available"
    """Warm, in a pool, and nobody's."""
    RUNNING = "running"
    """Somebody's, and up."""
    PAUSING = "pausing"
    """On its way to being paused."""
    PAUSED = "paused"
    """Resting, or on its way back (reason `Resuming`)."""
    DEAD = "dead"
    """Over; nothing brings it back."""


class StateReport(Struct, frozen=True):
    """A state and why."""

    state: SandboxState
    reason: str
    is_ready: bool = False
    """Whether requests to it can be served now."""


class Eligibility(Struct, frozen=True):
    """Whether something may be done, and if not, why not."""

    is_allowed: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.is_allowed


ALLOWED = Eligibility(is_allowed=True)

_OVER = {
    Phase.SUCCEEDED: "Succeeded",
    Phase.FAILED: "Failed",
    Phase.TERMINATING: "Terminating",
}


def report(sandbox: Sandbox, now: datetime) -> StateReport:
    """Compute the state of a sandbox."""
    if reason := death(sandbox, now):
        return StateReport(SandboxState.DEAD, reason)
    if is_pooled(sandbox):
        return _pooled(sandbox)
    if sandbox.spec.recycle or sandbox.status.phase is Phase.RECYCLING:
        # For the one who gave it back it is over, though its pool may see it again.
        return StateReport(SandboxState.DEAD, "Recycling")
    return _in_use(sandbox)


def state(sandbox: Sandbox, now: datetime) -> SandboxState:
    """Compute the state alone."""
    return report(sandbox, now).state


def death(sandbox: Sandbox, now: datetime) -> str:
    """Say why a sandbox is over; empty where it is not."""
    if sandbox.is_deleting:
        return "Deleted"
    if deadlines.is_over(sandbox.spec, now=now) and not is_resuming(sandbox):
        return "ShutdownTimeReached"
    return _OVER.get(sandbox.status.phase, "")


def is_resuming(sandbox: Sandbox) -> bool:
    """Say whether it is on its way back: its timeout is for running, and it does not run yet."""
    resting = (Phase.PAUSED, Phase.PAUSING, Phase.RESUMING)
    return not sandbox.spec.paused and sandbox.status.phase in resting


def is_pooled(sandbox: Sandbox) -> bool:
    """Say whether it waits in a pool, nobody's."""
    return sandbox.spec.claim is None and LABEL_POOL in sandbox.metadata.labels


def is_ready(sandbox: Sandbox) -> bool:
    """Say whether it runs and answers."""
    status = sandbox.status
    return status.phase is Phase.RUNNING and is_true(status.conditions, CONDITION_READY)


def is_fully_paused(sandbox: Sandbox) -> bool:
    """Say whether its pause is finished: nothing of it runs, everything of it is kept."""
    if sandbox.status.phase is not Phase.PAUSED:
        return False
    found = condition(sandbox.status.conditions, CONDITION_PAUSED)
    return found is None or found.status is ConditionStatus.TRUE


def _pooled(sandbox: Sandbox) -> StateReport:
    if sandbox.status.phase is Phase.RECYCLING or sandbox.spec.recycle:
        return StateReport(SandboxState.CREATING, "Recycling")
    if is_ready(sandbox) and not sandbox.spec.paused:
        return StateReport(SandboxState.AVAILABLE, "PooledAndReady", is_ready=True)
    return StateReport(SandboxState.CREATING, "PooledButNotReady")


def _in_use(sandbox: Sandbox) -> StateReport:
    phase, wants_pause = sandbox.status.phase, sandbox.spec.paused
    if phase is Phase.PENDING:
        return StateReport(SandboxState.CREATING, "Pending")
    if phase is Phase.RUNNING and not wants_pause:
        if is_ready(sandbox):
            return StateReport(SandboxState.RUNNING, "Ready", is_ready=True)
        # Not dead: it is somebody's, with their files, and may answer again in a moment.
        return StateReport(SandboxState.RUNNING, "NotReady")
    if wants_pause:
        if is_fully_paused(sandbox):
            return StateReport(SandboxState.PAUSED, "Paused")
        return StateReport(SandboxState.PAUSING, "Pausing")
    if phase is Phase.PAUSING:
        # The flag was cleared while it was being paused: it is paused first, then resumed.
        return StateReport(SandboxState.PAUSING, "PausingThenResuming")
    return StateReport(SandboxState.PAUSED, "Resuming")


def pausable(sandbox: Sandbox, now: datetime) -> Eligibility:
    """Say whether a pause may be asked for; asking again for the same is allowed."""
    refusal = _refusal(sandbox, now)
    if refusal is not None:
        return refusal
    if sandbox.status.phase in (Phase.PAUSED, Phase.PAUSING, Phase.RUNNING) and sandbox.spec.paused:
        return ALLOWED
    if is_ready(sandbox):
        return ALLOWED
    if sandbox.status.phase is Phase.RUNNING:
        return Eligibility(False, "SandboxIsRunningButNotReady")
    if sandbox.status.phase in (Phase.PAUSED, Phase.PAUSING, Phase.RESUMING):
        return Eligibility(False, "SandboxIsResuming")
    return Eligibility(False, "SandboxPhaseNotAllowed")


def resumable(sandbox: Sandbox, now: datetime) -> Eligibility:
    """Say whether a resume may be asked for; asking of what runs already is allowed."""
    refusal = _refusal(sandbox, now)
    if refusal is not None:
        return refusal
    phase, wants_pause = sandbox.status.phase, sandbox.spec.paused
    if not wants_pause and phase in (Phase.RUNNING, Phase.RESUMING, Phase.PAUSED):
        return ALLOWED
    if wants_pause and is_fully_paused(sandbox):
        return ALLOWED
    if phase in (Phase.RUNNING, Phase.PAUSING, Phase.PAUSED, Phase.RESUMING):
        return Eligibility(False, "SandboxIsPausing")
    return Eligibility(False, "SandboxPhaseNotAllowed")


def _refusal(sandbox: Sandbox, now: datetime) -> Eligibility | None:
    if sandbox.is_deleting or sandbox.status.phase is Phase.TERMINATING:
        return Eligibility(False, "SandboxIsTerminating")
    if deadlines.is_over(sandbox.spec, now=now) and not is_resuming(sandbox):
        return Eligibility(False, "ShutdownTimeReached")
    if is_pooled(sandbox) or sandbox.spec.recycle or sandbox.status.phase is Phase.RECYCLING:
        return Eligibility(False, "SandboxStateNotAllowed")
    return None
