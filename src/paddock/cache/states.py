"""The state of a sandbox as APIs, routes and pools see it: computed, never stored.

Pure functions of a Sandbox and the time. The controller records the phase; a state also takes
flags and deadlines into account: a sandbox past its shutdownTime is dead at once, even while its
processes are still ending. Waiting for a state is in `waits`.
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
    """The state of a sandbox as clients see it."""

    CREATING = "creating"
    """Being created."""
    AVAILABLE = "available"
    """Warm, unclaimed, in a pool."""
    RUNNING = "running"
    """Claimed and running."""
    PAUSING = "pausing"
    """Being paused."""
    PAUSED = "paused"
    """Paused, or being resumed (reason `Resuming`)."""
    DEAD = "dead"
    """Ended for good."""


class StateReport(Struct, frozen=True):
    """A state with its reason."""

    state: SandboxState
    reason: str
    is_ready: bool = False
    """Whether it can serve requests now."""


class Eligibility(Struct, frozen=True):
    """Whether an action is allowed, and the reason if not."""

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


_STOPPED_PHASES = (Phase.PAUSED, *_OVER)
"""Phases in which no process of a sandbox with `spec.paused` runs."""


def report(sandbox: Sandbox, now: datetime) -> StateReport:
    """Compute the state of a sandbox."""
    if reason := end_reason(sandbox, now):
        return StateReport(SandboxState.DEAD, reason)
    if is_pooled(sandbox):
        return _pooled(sandbox)
    if sandbox.spec.recycle or sandbox.status.phase is Phase.RECYCLING:
        # It has ended for the client that released it; its pool may use it again.
        return StateReport(SandboxState.DEAD, "Recycling")
    return _in_use(sandbox)


def state(sandbox: Sandbox, now: datetime) -> SandboxState:
    """Compute the state alone."""
    return report(sandbox, now).state


def end_reason(sandbox: Sandbox, now: datetime) -> str:
    """Return why a sandbox is dead, or an empty string."""
    if sandbox.is_deleting:
        return "Deleted"
    if deadlines.is_over(sandbox.spec, now=now) and not is_resuming(sandbox):
        return "ShutdownTimeReached"
    return _OVER.get(sandbox.status.phase, "")


def is_resuming(sandbox: Sandbox) -> bool:
    """Whether it is being resumed. Its timeout counts from when it runs, so it cannot expire."""
    resting = (Phase.PAUSED, Phase.PAUSING, Phase.RESUMING)
    return not sandbox.spec.paused and sandbox.status.phase in resting


def is_running_or_pausing(sandbox: Sandbox) -> bool:
    """Whether it counts as running: its processes may run, or will run soon.

    A sandbox that is being paused runs until the pause is complete. Quotas and APIs count it as
    running until then.
    """
    return not sandbox.spec.paused or sandbox.status.phase not in _STOPPED_PHASES


def is_pooled(sandbox: Sandbox) -> bool:
    """Whether it is in a pool and unclaimed."""
    return sandbox.spec.claim is None and LABEL_POOL in sandbox.metadata.labels


def is_ready(sandbox: Sandbox) -> bool:
    """Whether it runs and is ready."""
    status = sandbox.status
    return status.phase is Phase.RUNNING and is_true(status.conditions, CONDITION_READY)


def is_fully_paused(sandbox: Sandbox) -> bool:
    """Whether its pause is complete: no process runs, and its state is kept."""
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
        # Not dead: it holds a client's files and may become ready again.
        return StateReport(SandboxState.RUNNING, "NotReady")
    if wants_pause:
        if is_fully_paused(sandbox):
            return StateReport(SandboxState.PAUSED, "Paused")
        return StateReport(SandboxState.PAUSING, "Pausing")
    if phase is Phase.PAUSING:
        # The flag was cleared during the pause: the pause is completed first, then it resumes.
        return StateReport(SandboxState.PAUSING, "PausingThenResuming")
    return StateReport(SandboxState.PAUSED, "Resuming")


def pausable(sandbox: Sandbox, now: datetime) -> Eligibility:
    """Whether it may be paused; pausing a paused sandbox is allowed."""
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
    """Whether it may be resumed; resuming a running sandbox is allowed."""
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
