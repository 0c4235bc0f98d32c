"""The status of a pool: counts and conditions. Pure."""

from collections.abc import Iterable
from datetime import datetime

from msgspec import structs

from paddock.controllers.pool.plan import Counts, PoolPlan
from paddock.resources.kinds.pool import CONDITION_DEGRADED, SandboxPool, SandboxPoolStatus
from paddock.resources.kinds.sandbox import (
    CONDITION_IMAGE,
    LABEL_CLAIMED,
    LABEL_POOL,
    REASON_PULL_FAILED,
    Sandbox,
)
from paddock.resources.meta import Condition, ConditionStatus, condition, set_condition

CONDITION_AVAILABLE = "Available"
_FALSE = ("Empty", "AsExpected")


def computed(
    pool: SandboxPool,
    status: SandboxPoolStatus,
    counts: Counts,
    decision: PoolPlan,
    *,
    revision: str,
    now: datetime,
    image_problem: str = "",
) -> SandboxPoolStatus:
    """Return the status from the counts and the plan.

    `image_problem` says why the image of new sandboxes cannot be pulled; empty: it can.
    """
    idle = counts.starting + counts.available
    stocked = _condition(pool, CONDITION_AVAILABLE, "Stocked" if counts.available else "Empty")
    reason, text = "AsExpected", ""
    if status.failures > 0:
        reason, text = "CrashLooping", decision.reason
    elif image_problem:
        reason, text = REASON_PULL_FAILED, image_problem
    looping = _condition(pool, CONDITION_DEGRADED, reason, text)
    conditions = set_condition(status.conditions, stocked, now=now)
    return structs.replace(
        status,
        observed_generation=pool.metadata.generation,
        replicas=idle,
        available=counts.available,
        creating=counts.starting,
        allocated=counts.allocated,
        total=idle + counts.allocated,
        desired=decision.desired,
        pending_requests=counts.supply,
        revision=revision,
        updated=counts.creating_new + counts.recycling_new + counts.available_new,
        updated_available=counts.available_new,
        selector=f"{LABEL_POOL}={pool.metadata.name},{LABEL_CLAIMED}=false",
        conditions=set_condition(conditions, looping, now=now),
    )


def image_problem(starting: Iterable[Sandbox]) -> str:
    """Return why the image of sandboxes that are starting cannot be pulled; empty: it can."""
    for sandbox in starting:
        found = condition(sandbox.status.conditions, CONDITION_IMAGE)
        if found is not None and found.reason == REASON_PULL_FAILED:
            return found.message
    return ""


def degraded(pool: SandboxPool, reason: str, message: str, *, now: datetime) -> SandboxPoolStatus:
    """Return the status of a pool that cannot be reconciled."""
    new = _condition(pool, CONDITION_DEGRADED, reason, message)
    conditions = set_condition(pool.status.conditions, new, now=now)
    return structs.replace(pool.status, conditions=conditions)


def _condition(pool: SandboxPool, kind: str, reason: str, message: str = "") -> Condition:
    return Condition(
        type=kind,
        status=ConditionStatus.FALSE if reason in _FALSE else ConditionStatus.TRUE,
        reason=reason,
        message=message,
        observed_generation=pool.metadata.generation,
    )
