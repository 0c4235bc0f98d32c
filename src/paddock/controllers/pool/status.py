"""The status of a pool: counts and conditions. Pure."""

from datetime import datetime

from msgspec import structs

from paddock.controllers.pool.plan import Counts, PoolPlan
from paddock.resources.kinds.pool import CONDITION_DEGRADED, SandboxPool, SandboxPoolStatus
from paddock.resources.kinds.sandbox import LABEL_CLAIMED, LABEL_POOL
from paddock.resources.meta import Condition, ConditionStatus, set_condition

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
) -> SandboxPoolStatus:
    """Return the status from the counts and the plan."""
    idle = counts.starting + counts.available
    stocked = _condition(pool, CONDITION_AVAILABLE, "Stocked" if counts.available else "Empty")
    loops = status.failures > 0
    looping = _condition(
        pool,
        CONDITION_DEGRADED,
        "CrashLooping" if loops else "AsExpected",
        decision.reason if loops else "",
    )
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
