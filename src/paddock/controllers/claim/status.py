"""The status of a SandboxClaim: counts and conditions. Pure."""

from datetime import datetime

from msgspec import structs

from paddock.controllers.claim.plan import UPDATE_REFUSED, FinishClaim
from paddock.controllers.claim.progress import ClaimedSandboxes
from paddock.resources.kinds.claim import (
    ClaimedSandbox,
    ClaimPhase,
    SandboxClaim,
    SandboxClaimStatus,
)
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Condition, ConditionStatus, set_condition

CONDITION_COMPLETED = "Completed"
CONDITION_FAILED = "Failed"
"""As for a Job, exactly one of the two is set at the end of a claim."""
CONDITION_TIMED_OUT = "TimedOut"
CONDITION_UPDATED = "InplaceUpdate"
"""Whether warm sandboxes get the image and size of the claim; if not, the reason says what happens
instead."""
REASON_IN_PLACE = "InPlace"
REASON_CREATED_NEW = "CreatedNew"
REASON_REFUSED = "Refused"


def is_over(claim: SandboxClaim) -> bool:
    """Whether the controller has nothing more to do for a claim."""
    return claim.is_deleting or claim.status.phase.is_final


def progress(claim: SandboxClaim, sandboxes: ClaimedSandboxes) -> SandboxClaimStatus:
    """Return the status with the ready count; one more ready sandbox resets the failures."""
    status, ready = claim.status, len(sandboxes.ready)
    if ready <= status.claimed_replicas:
        return status
    return structs.replace(status, claimed_replicas=ready, failures=0, backoff_until=None)


def updated(
    claim: SandboxClaim, status: SandboxClaimStatus, why_not: str, *, now: datetime
) -> SandboxClaimStatus:
    """Return the status with the condition of the in-place update."""
    if why_not:
        new = _condition(claim, CONDITION_UPDATED, REASON_CREATED_NEW, why_not, holds=False)
    else:
        new = _condition(claim, CONDITION_UPDATED, REASON_IN_PLACE, "")
    return structs.replace(status, conditions=set_condition(status.conditions, new, now=now))


def ended(
    claim: SandboxClaim, sandboxes: ClaimedSandboxes, end: FinishClaim, *, now: datetime
) -> SandboxClaimStatus:
    """Return the status of a claim that has ended, with its sandboxes."""
    kind = CONDITION_FAILED if end.is_failure else CONDITION_COMPLETED
    new = [_condition(claim, kind, end.reason, end.message)]
    if end.timed_out:
        new.append(_condition(claim, CONDITION_TIMED_OUT, "ClaimTimeoutReached", end.message))
    if end.reason == UPDATE_REFUSED:
        new.append(_condition(claim, CONDITION_UPDATED, REASON_REFUSED, end.message, holds=False))
    conditions = claim.status.conditions
    for item in new:
        conditions = set_condition(conditions, item, now=now)
    return structs.replace(
        progress(claim, sandboxes),
        phase=ClaimPhase.FAILED if end.is_failure else ClaimPhase.COMPLETED,
        message=end.message,
        sandboxes=tuple(_named(sandbox) for sandbox in sandboxes.ready),
        completion_time=now,
        conditions=conditions,
    )


def _named(sandbox: Sandbox) -> ClaimedSandbox:
    public = sandbox.spec.claim.sandbox_id if sandbox.spec.claim else ""
    return ClaimedSandbox(name=sandbox.metadata.name, sandbox_id=public)


def _condition(
    claim: SandboxClaim, kind: str, reason: str, message: str, *, holds: bool = True
) -> Condition:
    return Condition(
        type=kind,
        status=ConditionStatus.TRUE if holds else ConditionStatus.FALSE,
        reason=reason,
        message=message,
        observed_generation=claim.metadata.generation,
    )
