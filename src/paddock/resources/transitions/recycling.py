"""Returning a sandbox to its pool: one handler per `recycleStrategy.type`, pure.

A handler returns the outcome; the caller writes it, in one write. A sandbox that is unhealthy, was
recycled too often, or whose pool was deleted is always deleted.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from msgspec import Struct, structs

from paddock.resources.kinds.pool import RecycleType, SandboxPool
from paddock.resources.kinds.sandbox import (
    LABEL_CLAIMED,
    LABEL_EVICT,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_TEMPLATE,
    Phase,
    Sandbox,
    SandboxSpec,
)
from paddock.resources.meta import owner_reference, with_meta

ANNOTATION_RESET_BY = "paddock.dev/reset-by"
"""Deadline of a reset."""


class Delete(Struct, frozen=True):
    """The sandbox is deleted."""

    why: str = ""


class Return(Struct, frozen=True):
    """The sandbox returns to its pool as this; equal to the input if nothing is to be written."""

    sandbox: Sandbox


Outcome = Delete | Return
Handler = Callable[[Sandbox, SandboxPool, datetime], Outcome]


def _delete(_sandbox: Sandbox, _pool: SandboxPool, _now: datetime) -> Outcome:
    return Delete("the recycle strategy of its pool is Delete")


def _noop(sandbox: Sandbox, pool: SandboxPool, _now: datetime) -> Outcome:
    if sandbox.spec.image is not None or sandbox.spec.resources is not None:
        return Delete("its claim changed its image or size")
    return Return(unclaimed(sandbox, pool))


def _restart(sandbox: Sandbox, pool: SandboxPool, now: datetime) -> Outcome:
    strategy = pool.spec.recycle_strategy
    if sandbox.status.recycled_count >= strategy.max_recycles:
        return Delete(f"it was already reset {sandbox.status.recycled_count} times")
    by = now + timedelta(seconds=strategy.timeout_seconds)
    back = unclaimed(sandbox, pool)
    annotations = {**back.metadata.annotations, ANNOTATION_RESET_BY: by.isoformat()}
    back = with_meta(back, annotations=annotations)
    return Return(structs.replace(back, spec=structs.replace(back.spec, recycle=True)))


HANDLERS: dict[RecycleType, Handler] = {
    RecycleType.DELETE: _delete,
    RecycleType.NOOP: _noop,
    RecycleType.RESTART: _restart,
}


def outcome(sandbox: Sandbox, pool: SandboxPool | None, *, now: datetime) -> Outcome:
    """Return the outcome for a released sandbox."""
    if pool is None or pool.is_deleting:
        return Delete("its pool was deleted")
    if sandbox.status.phase is not Phase.RUNNING or sandbox.spec.paused:
        state = "paused" if sandbox.spec.paused else sandbox.status.phase
        return Delete(f"it is {state}")
    if LABEL_EVICT in sandbox.metadata.labels:
        return Delete("it is marked for eviction")
    return HANDLERS[pool.spec.recycle_strategy.type](sandbox, pool, now)


def unclaimed(sandbox: Sandbox, pool: SandboxPool) -> Sandbox:
    """Return the sandbox without its claim, owned by its pool."""
    if sandbox.spec.claim is None and sandbox.metadata.owner_references:
        return sandbox
    kept = {*pool.spec.labels, LABEL_POOL, LABEL_TEMPLATE, LABEL_REVISION}
    labels = {name: value for name, value in sandbox.metadata.labels.items() if name in kept}
    # Everything that the claim set is removed; the template stays.
    spec = SandboxSpec(
        template=sandbox.spec.template,
        template_ref=sandbox.spec.template_ref,
        restore_from=sandbox.spec.restore_from,
    )
    return with_meta(
        structs.replace(sandbox, spec=spec),
        labels={**labels, LABEL_CLAIMED: "false"},
        annotations={},
        owner_references=(owner_reference(pool),),
    )


def is_overdue(sandbox: Sandbox, now: datetime) -> bool:
    """Whether a reset has taken longer than its pool allows."""
    by = sandbox.metadata.annotations.get(ANNOTATION_RESET_BY)
    if not sandbox.spec.recycle or by is None:
        return False
    try:
        return datetime.fromisoformat(by) <= now
    except (TypeError, ValueError):
        # Only Paddock writes this; an unreadable value counts as overdue.
        return True
