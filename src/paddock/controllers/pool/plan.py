"""How many sandboxes a pool should make or let go: a pure decision over counts.

Terms: *idle* sandboxes are unclaimed (creating or available); *allocated* ones are in
somebody's hands; *supply* is what batches and waiting claims ask for beyond the buffer.
The buffer band counts what is ready; what is in the making counts towards the target, so a
slow start never makes the pool overshoot.
"""

import math
from datetime import datetime

from msgspec import Struct, structs

from paddock.resources.kinds.pool import Capacity, SandboxPoolSpec

FIRST_BATCH = 16
"""A pool that nothing has yet come out of makes so many at once, then twice what has worked."""
UNBOUNDED = 1 << 31
LULL_SECONDS = 2.0
"""So long after the last claim a pool is filled up in earnest: making sandboxes takes the
processors that claims, and the first commands after them, need. Until then one that is at least a
quarter full waits, one that is less full makes one at a time, and only an empty one hurries."""


class Counts(Struct, frozen=True, kw_only=True):
    """What is in a pool now."""

    creating_new: int = 0
    """In the making, of the current revision."""
    creating_old: int = 0
    available_new: int = 0
    available_old: int = 0
    """Ready, of an earlier revision or past the pool's max idle age."""
    leaving: int = 0
    """Unclaimed and on their way out: evicted, unhealthy, dead, terminating."""
    allocated: int = 0
    supply: int = 0

    @property
    def creating(self) -> int:
        """In the making, of any revision."""
        return self.creating_new + self.creating_old

    @property
    def available(self) -> int:
        """Ready, of any revision."""
        return self.available_new + self.available_old


class PoolPlan(Struct, frozen=True, kw_only=True):
    """What to do now."""

    desired: int
    """Sandboxes that the pool should have in all, allocated ones included."""
    create: int = 0
    delete_creating: int = 0
    delete_available: int = 0
    """Taken from what is too many: old revision first, then newest."""
    replace_creating: int = 0
    replace_available: int = 0
    """Of an old revision, within the update budget."""
    wait_seconds: float | None = None
    """Look again then, whatever happens."""
    reason: str = ""
    yields: bool = False
    """It is short of some and makes none of them yet, as claims come first."""


def band(spec: SandboxPoolSpec, allocated: int) -> Capacity:
    """Give the capacity band; `replicas` is short for bufferMin = bufferMax without a ceiling."""
    if spec.capacity is not None:
        return spec.capacity
    replicas = spec.replicas or 0
    return Capacity(buffer_min=replicas, buffer_max=replicas, pool_min=0, pool_max=UNBOUNDED)


def share(value: int | str | None, of: int, *, default: int) -> int:
    """Read a number or a percentage; a percentage is rounded up, so that work goes on."""
    if value is None:
        return default
    if isinstance(value, int):
        return value
    return math.ceil(int(value.rstrip("%")) * of / 100)


def desired_total(spec: SandboxPoolSpec, counts: Counts) -> int:
    """Say how many the pool should have in all."""
    capacity = band(spec, counts.allocated)
    buffer = min(max(counts.available, capacity.buffer_min), capacity.buffer_max)
    wanted = max(counts.allocated + counts.supply + buffer, capacity.pool_min)
    return max(min(wanted, capacity.pool_max), counts.allocated)


def plan(
    spec: SandboxPoolSpec,
    counts: Counts,
    *,
    failures: int = 0,
    backoff_until: datetime | None = None,
    since_claim_seconds: float = math.inf,
    now: datetime,
) -> PoolPlan:
    """Decide what a pool does next."""
    desired = desired_total(spec, counts)
    if spec.paused:
        return PoolPlan(desired=desired, reason="the pool is paused")
    present = counts.allocated + counts.creating + counts.available
    if present < desired:
        grown = _grow(spec, counts, desired, failures, backoff_until, now)
        if not grown.create or since_claim_seconds >= LULL_SECONDS or not _can_wait(counts):
            return grown
        is_low = 4 * counts.available_new < band(spec, counts.allocated).buffer_min
        return structs.replace(
            grown,
            create=1 if is_low and not counts.creating else 0,
            wait_seconds=LULL_SECONDS - since_claim_seconds,
            reason="claims come first",
            yields=not is_low,
        )
    if present > desired:
        return _shrink(counts, desired, present - desired)
    return _update(spec, counts, desired)


def _can_wait(counts: Counts) -> bool:
    """Say whether there is something in stock for those who claim now."""
    return not counts.supply and counts.available_new > 0


def _grow(
    spec: SandboxPoolSpec,
    counts: Counts,
    desired: int,
    failures: int,
    backoff_until: datetime | None,
    now: datetime,
) -> PoolPlan:
    if failures and backoff_until is not None and backoff_until > now:
        wait = (backoff_until - now).total_seconds()
        return PoolPlan(
            desired=desired,
            wait_seconds=wait,
            reason=f"{failures} failed starts in a row; next try in {wait:.0f} s",
        )
    present = counts.allocated + counts.creating + counts.available
    room = max(band(spec, counts.allocated).pool_max - present - counts.leaving, 0)
    create = min(desired - present, room, _in_flight_limit(spec, counts, desired, failures))
    if create <= 0:
        return PoolPlan(desired=desired, reason="as many are in the making as may be at once")
    return PoolPlan(desired=desired, create=create, reason=f"{desired - present} short")


def _in_flight_limit(spec: SandboxPoolSpec, counts: Counts, desired: int, failures: int) -> int:
    if failures:
        return max(1 - counts.creating, 0)
    proven = counts.available + counts.allocated
    slow_start = max(FIRST_BATCH, 2 * proven)
    limit = min(slow_start, share(spec.scale_strategy.max_unavailable, desired, default=slow_start))
    return max(limit - counts.creating, 0)


def _shrink(counts: Counts, desired: int, excess: int) -> PoolPlan:
    from_creating = min(excess, counts.creating)
    return PoolPlan(
        desired=desired,
        delete_creating=from_creating,
        delete_available=min(excess - from_creating, counts.available),
        reason=f"{excess} too many",
    )


def _update(spec: SandboxPoolSpec, counts: Counts, desired: int) -> PoolPlan:
    if spec.update_strategy.paused or not (counts.creating_old or counts.available_old):
        return PoolPlan(desired=desired, reason="as it should be")
    idle = counts.creating + counts.available
    budget = max(share(spec.update_strategy.max_unavailable, idle, default=1), 1)
    replace = min(counts.available_old, max(budget - counts.creating_new, 0))
    return PoolPlan(
        desired=desired,
        replace_creating=counts.creating_old,
        replace_available=replace,
        reason=f"replacing {counts.creating_old + replace} of an earlier revision",
    )
