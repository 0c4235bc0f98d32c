"""Decides the next step for one SandboxClaim. Pure.

A claim is like a Job: once completed or failed it stays so. Its sandboxes belong to its owner and
outlive it; killing one later does not make the claim acquire another. A sandbox that failed before
it was ready is given up and replaced until the claim times out, with backoff and one at a time: a
claim that cannot be served must not use up a pool's warm sandboxes.
"""

from datetime import datetime, timedelta

from paddock.controllers.claim.progress import ClaimedSandboxes
from paddock.controllers.steps import Expire, Step, Wait
from paddock.kit.backoff import Backoff
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.sandbox import Sandbox

ALL_CLAIMED = "AllReplicasClaimed"
UPDATE_REFUSED = "InplaceUpdateRefused"
FIRST_BATCH = 5
MAX_BATCH = 50
_BACKOFF = Backoff(base_seconds=2.0, cap_seconds=16.0, jitter=0.0)


class StartClaim(Step, frozen=True):
    """Record when claiming began."""


class AcquireMore(Step, frozen=True):
    """Try to claim `count` more."""

    count: int


class AwaitSandboxes(Step, frozen=True):
    """Wait for events; reconcile again at `until` at the latest."""

    until: datetime


class Resize(Step, frozen=True):
    """Resize these sandboxes to the size of the claim."""

    sandboxes: tuple[Sandbox, ...]


class AbandonSandboxes(Step, frozen=True):
    """Abandon these sandboxes, which were not handed over."""

    sandboxes: tuple[Sandbox, ...]
    is_failure: bool = True
    """Whether they failed; False if only the claim timed out."""


class FinishClaim(Step, frozen=True):
    """End the claim: completed with all of its replicas, or failed with fewer."""

    reason: str
    message: str
    timed_out: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether the claim got fewer sandboxes than it requested."""
        return self.reason != ALL_CLAIMED


def plan(
    claim: SandboxClaim,
    sandboxes: ClaimedSandboxes,
    *,
    target_exists: bool,
    refusal: str = "",
    now: datetime,
) -> Step:
    """Decide the next step, given the claim's sandboxes.

    `refusal` is why the claim can never be served; empty if it can.
    """
    if claim.is_deleting:
        return Wait(None)
    if claim.status.phase.is_final:
        return _expire(claim, now)
    started = claim.status.claim_start_time
    if started is None:
        return StartClaim()
    if sandboxes.lost:
        return AbandonSandboxes(sandboxes.lost)
    end = started + timedelta(seconds=claim.spec.claim_timeout_seconds)
    ending = _ending(
        claim, sandboxes, target_exists=target_exists, refusal=refusal, is_late=now >= end
    )
    if ending is not None:
        # The status will not list sandboxes that are not ready by now: they must not stay claimed.
        late = sandboxes.pending
        return AbandonSandboxes(late, is_failure=False) if late else ending
    if sandboxes.unsized:
        return Resize(sandboxes.unsized)
    if refusal or not target_exists:
        return AwaitSandboxes(min(end, sandboxes.until or end))
    return _more(claim, sandboxes, end, now)


def _ending(
    claim: SandboxClaim,
    sandboxes: ClaimedSandboxes,
    *,
    target_exists: bool,
    refusal: str,
    is_late: bool,
) -> FinishClaim | None:
    """Return how the claim ends, if it ends now."""
    got, wanted = _got(claim, sandboxes), claim.spec.replicas
    if got >= wanted:
        return FinishClaim(ALL_CLAIMED, f"{got} of {wanted} claimed")
    if is_late:
        message = f"{got} of {wanted} claimed in time"
        _, _, why = claim.status.message.partition("; ")
        return FinishClaim(
            "TimeoutReached", f"{message}; {why}" if why else message, timed_out=True
        )
    if sandboxes.pending:
        return None
    if not target_exists:
        name = claim.spec.template_name
        return FinishClaim("TemplateNotFound", f"no pool, environment or template {name!r}")
    return FinishClaim(UPDATE_REFUSED, refusal) if refusal else None


def _more(claim: SandboxClaim, sandboxes: ClaimedSandboxes, end: datetime, now: datetime) -> Step:
    """Take more, or wait for pending sandboxes or for the end of the backoff."""
    got, coming = _got(claim, sandboxes), len(sandboxes.pending)
    count = min(claim.spec.replicas - got - coming, max(FIRST_BATCH, got + coming), MAX_BATCH)
    until = min(end, sandboxes.until or end)
    if claim.status.failures:
        count = min(count, 1 - coming)
        pause = claim.status.backoff_until
        if pause is not None and now < pause:
            return AwaitSandboxes(min(until, pause))
    return AcquireMore(count) if count > 0 else AwaitSandboxes(until)


def _got(claim: SandboxClaim, sandboxes: ClaimedSandboxes) -> int:
    # A sandbox that was claimed and killed meanwhile still counts as claimed.
    return max(len(sandboxes.ready), claim.status.claimed_replicas)


def pause_after(failures: int) -> timedelta:
    """Return the backoff after so many failures in a row."""
    return timedelta(seconds=_BACKOFF.delay(failures))


def _expire(claim: SandboxClaim, now: datetime) -> Step:
    ttl, finished = claim.spec.ttl_seconds_after_completed, claim.status.completion_time
    if ttl < 0 or finished is None:
        return Wait(None)
    end = finished + timedelta(seconds=ttl)
    return Expire() if end <= now else Wait(end)
