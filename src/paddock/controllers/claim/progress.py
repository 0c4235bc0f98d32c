"""The progress of a claim's sandboxes towards being handed over. Pure.

A sandbox that was ready once counts for the claim permanently, even if it fails later.
Everything is read from the sandbox itself, so that a restarted controller reads the same.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct

from paddock.cache import checks
from paddock.kit.errors import PaddockError
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.sandbox import LABEL_GIVEN_UP, Sandbox


class ClaimedState(StrEnum):
    """The progress of one sandbox."""

    READY = "ready"
    """Was ready, with the image and size of its claim."""
    UNSIZED = "unsized"
    """Runs, and has yet to be resized."""
    COMING = "coming"
    """Is being created, or restarted with its image."""
    LOST = "lost"
    """Failed before it was ready, or took too long."""
    LEFT = "left"
    """No longer belongs to the claim."""


class ClaimedSandboxes(Struct, frozen=True, kw_only=True):
    """The sandboxes of a claim by progress."""

    ready: tuple[Sandbox, ...] = ()
    unsized: tuple[Sandbox, ...] = ()
    coming: tuple[Sandbox, ...] = ()
    lost: tuple[Sandbox, ...] = ()
    until: datetime | None = None
    """When the first pending sandbox will have taken too long."""

    @property
    def pending(self) -> tuple[Sandbox, ...]:
        """Sandboxes that may still become ready."""
        return self.unsized + self.coming


def group_by_state(
    claim: SandboxClaim, sandboxes: Iterable[Sandbox], *, now: datetime
) -> ClaimedSandboxes:
    """Group a claim's sandboxes by progress."""
    found: dict[ClaimedState, list[Sandbox]] = {state: [] for state in ClaimedState}
    for sandbox in sorted(sandboxes, key=lambda item: item.metadata.name):
        found[claimed_state(claim, sandbox, now=now)].append(sandbox)
    waiting = found[ClaimedState.UNSIZED] + found[ClaimedState.COMING]
    taken = [item.spec.claim.claim_time for item in waiting if item.spec.claim is not None]
    return ClaimedSandboxes(
        ready=tuple(found[ClaimedState.READY]),
        unsized=tuple(found[ClaimedState.UNSIZED]),
        coming=tuple(found[ClaimedState.COMING]),
        lost=tuple(found[ClaimedState.LOST]),
        until=min(taken) + _ready_timeout(claim) if taken else None,
    )


def claimed_state(claim: SandboxClaim, sandbox: Sandbox, *, now: datetime) -> ClaimedState:
    """Return the progress of one sandbox."""
    identity = sandbox.spec.claim
    if identity is None or identity.claim_uid != claim.metadata.uid:
        return ClaimedState.LEFT
    if LABEL_GIVEN_UP in sandbox.metadata.labels:
        return ClaimedState.LEFT
    runs = _has_run(sandbox)
    if runs and _has_size(sandbox):
        return ClaimedState.READY
    if sandbox.is_deleting:
        return ClaimedState.LEFT
    if now >= identity.claim_time + _ready_timeout(claim) or _is_over(sandbox, now):
        return ClaimedState.LOST
    return ClaimedState.UNSIZED if runs else ClaimedState.COMING


def why_lost(sandbox: Sandbox, *, now: datetime) -> str:
    """Return why a sandbox was not handed over."""
    try:
        missing = checks.ready(sandbox, now)
    except PaddockError as error:
        return error.message
    if missing is None and not _has_size(sandbox):
        missing = "it has not been resized"
    return f"sandbox {sandbox.key} was not ready in time: {missing or 'it became ready too late'}"


def _has_run(sandbox: Sandbox) -> bool:
    """Whether it was ready at some time with the image of its claim."""
    wanted = sandbox.spec.image
    return sandbox.status.incarnation > 0 and wanted in (None, sandbox.status.image)


def _has_size(sandbox: Sandbox) -> bool:
    return sandbox.spec.resources in (None, sandbox.status.resources)


def _is_over(sandbox: Sandbox, now: datetime) -> bool:
    try:
        checks.ready(sandbox, now)
    except PaddockError:
        return True
    return False


def _ready_timeout(claim: SandboxClaim) -> timedelta:
    return timedelta(seconds=claim.spec.wait_ready_timeout_seconds)
