"""Decides how many sandboxes a pool creates or deletes, from counts alone. Pure.

*Idle* sandboxes are unclaimed (creating, recycling or available); *allocated* ones are claimed;
*supply* is what batches and waiting claims need beyond the buffer. The buffer band counts ready
sandboxes; those being created count towards the target, so a slow start never overshoots. A
returned sandbox that is being reset is kept if the band has room for it when it is ready.
"""

import math
from datetime import datetime

from msgspec import Struct, structs

from paddock.resources.kinds.pool import Capacity, SandboxPoolSpec

FIRST_BATCH = 16
"""A pool without proven starts creates this many at once, later twice what worked."""
UNBOUNDED = 1 << 31
QUIET_SECONDS = 2.0
"""After the last claim a pool refills at full speed only after this time: creating sandboxes takes
CPU that claims and their first commands need. Until then a pool that is at least a quarter full
waits, a less full one creates one at a time, and only an empty one creates at once.
"""


class Counts(Struct, frozen=True, kw_only=True):
    """Members of a pool by state."""

    creating_new: int = 0
    """Being created, of the current revision."""
    creating_old: int = 0
    recycling_new: int = 0
    """Returned and being reset, of the current revision."""
    recycling_old: int = 0
    available_new: int = 0
    available_old: int = 0
    """Ready, of an earlier revision or past the pool's max idle age."""
    unusable: int = 0
    """Unclaimed, and evicted, paused, unhealthy, failed or being deleted."""
    allocated: int = 0
    supply: int = 0

    @property
    def creating(self) -> int:
        """Being created, of any revision."""
        return self.creating_new + self.creating_old

    @property
    def recycling(self) -> int:
        """Being reset, of any revision."""
        return self.recycling_new + self.recycling_old

    @property
    def starting(self) -> int:
        """Being created or reset, of any revision."""
        return self.creating + self.recycling

    @property
    def present(self) -> int:
        """All but the unusable ones."""
        return self.allocated + self.starting + self.available

    @property
    def available(self) -> int:
        """Ready, of any revision."""
        return self.available_new + self.available_old


class PoolPlan(Struct, frozen=True, kw_only=True):
    """The actions to perform now."""

    desired: int
    """Desired total size, allocated sandboxes included."""
    create: int = 0
    delete_creating: int = 0
    delete_recycling: int = 0
    delete_available: int = 0
    """Deleted because there are too many: old revision first, then newest."""
    replace_creating: int = 0
    replace_recycling: int = 0
    replace_available: int = 0
    """Of an old revision, within the update budget."""
    wait_seconds: float | None = None
    """Requeue after this time."""
    reason: str = ""
    defers: bool = False
    """Creation is deferred because claims come first."""


def band(spec: SandboxPoolSpec, allocated: int) -> Capacity:
    """Return the capacity band; `replicas` means bufferMin = bufferMax without a maximum."""
    if spec.capacity is not None:
        return spec.capacity
    replicas = spec.replicas or 0
    return Capacity(buffer_min=replicas, buffer_max=replicas, pool_min=0, pool_max=UNBOUNDED)


def int_or_percent(value: int | str | None, of: int, *, default: int) -> int:
    """Resolve a number or percentage; percentages round up, so that progress is possible."""
    if value is None:
        return default
    if isinstance(value, int):
        return value
    return math.ceil(int(value.rstrip("%")) * of / 100)


def desired_total(spec: SandboxPoolSpec, counts: Counts) -> int:
    """Return the desired total size."""
    capacity = band(spec, counts.allocated)
    buffer = _clamped(counts.available, capacity)
    # Returned sandboxes are not a reason to create others, but they are kept for the buffer.
    kept = _clamped(counts.available + counts.recycling, capacity)
    wanted = max(counts.supply + buffer, kept) + counts.allocated
    wanted = max(wanted, capacity.pool_min)
    return max(min(wanted, capacity.pool_max), counts.allocated)


def _clamped(count: int, capacity: Capacity) -> int:
    return min(max(count, capacity.buffer_min), capacity.buffer_max)


def plan(
    spec: SandboxPoolSpec,
    counts: Counts,
    *,
    failures: int = 0,
    backoff_until: datetime | None = None,
    since_claim_seconds: float = math.inf,
    now: datetime,
) -> PoolPlan:
    """Return the actions for a pool."""
    desired = desired_total(spec, counts)
    if spec.paused:
        return PoolPlan(desired=desired, reason="the pool is paused")
    present = counts.present
    if present < desired:
        grown = _grow(spec, counts, desired, failures, backoff_until, now)
        if not grown.create or since_claim_seconds >= QUIET_SECONDS or not _can_wait(counts):
            return grown
        is_low = 4 * counts.available_new < band(spec, counts.allocated).buffer_min
        return structs.replace(
            grown,
            create=1 if is_low and not counts.starting else 0,
            wait_seconds=QUIET_SECONDS - since_claim_seconds,
            reason="claims come first",
            defers=not is_low,
        )
    if present > desired:
        return _shrink(counts, desired, present - desired)
    return _update(spec, counts, desired)


def _can_wait(counts: Counts) -> bool:
    """Whether there is stock for claims that arrive now."""
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
            reason=f"{failures} failed starts in a row; retry in {wait:.0f} s",
        )
    present = counts.present
    room = max(band(spec, counts.allocated).pool_max - present - counts.unusable, 0)
    create = min(desired - present, room, _in_flight_limit(spec, counts, desired, failures))
    if create <= 0:
        return PoolPlan(desired=desired, reason="the limit of concurrent creations is reached")
    return PoolPlan(desired=desired, create=create, reason=f"{desired - present} short")


def _in_flight_limit(spec: SandboxPoolSpec, counts: Counts, desired: int, failures: int) -> int:
    if failures:
        return max(1 - counts.starting, 0)
    proven = counts.available + counts.allocated
    slow_start = max(FIRST_BATCH, 2 * proven)
    limit = min(
        slow_start, int_or_percent(spec.scale_strategy.max_unavailable, desired, default=slow_start)
    )
    return max(limit - counts.starting, 0)


def _shrink(counts: Counts, desired: int, excess: int) -> PoolPlan:
    from_creating = min(excess, counts.creating)
    from_recycling = min(excess - from_creating, counts.recycling)
    return PoolPlan(
        desired=desired,
        delete_creating=from_creating,
        delete_recycling=from_recycling,
        delete_available=min(excess - from_creating - from_recycling, counts.available),
        reason=f"{excess} too many",
    )


def _update(spec: SandboxPoolSpec, counts: Counts, desired: int) -> PoolPlan:
    old = counts.creating_old + counts.recycling_old
    if spec.update_strategy.paused or not (old or counts.available_old):
        return PoolPlan(desired=desired, reason="up to date")
    idle = counts.starting + counts.available
    budget = max(int_or_percent(spec.update_strategy.max_unavailable, idle, default=1), 1)
    started = counts.creating_new + counts.recycling_new
    replace = min(counts.available_old, max(budget - started, 0))
    return PoolPlan(
        desired=desired,
        replace_creating=counts.creating_old,
        replace_recycling=counts.recycling_old,
        replace_available=replace,
        reason=f"replacing {old + replace} of an earlier revision",
    )
