"""Decides how many of a pool's ready sandboxes each batch gets. Pure.

Order: priority, which grows with waiting time, so that no batch starves; then the tenant that holds
least, so that one namespace cannot crowd out another; then age. A batch with `minAvailable` gets
all of it or nothing, and while it is first, no batch behind it is served: otherwise small batches
would starve it. A batch that can never be served is skipped and reported.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime

from msgspec import Struct

from paddock.kit.errors import NotFoundError
from paddock.resources.meta import Key

AGEING_SECONDS = 60.0
"""Waiting this long counts as one step of priority."""


class BatchDemand(Struct, frozen=True, kw_only=True):
    """A batch that needs sandboxes of this pool."""

    key: Key
    tenant: str
    since: datetime
    missing: int
    """Shards without a sandbox."""
    held: int = 0
    """Sandboxes that it already holds."""
    priority: int = 0
    at_once: int = 0
    """All of these at once or none; 0 if any number is useful."""


class PoolStock(Struct, frozen=True, kw_only=True):
    """The stock of a pool."""

    ready: int
    allocated: int = 0
    ceiling: int = 1 << 31
    """`poolMax`: never more than this are allocated."""
    limit: int | None = None
    """The ceiling after autoscaling; `None` if it is fixed."""
    held_by_tenant: Mapping[str, int] = {}

    @property
    def grantable(self) -> int:
        """Number of sandboxes that can be allocated now."""
        return max(min(self.ready, self.ceiling - self.allocated), 0)


class AllocationPlan(Struct, frozen=True, kw_only=True):
    """The result of planning."""

    grants: Mapping[Key, int] = {}
    unmet: int = 0
    """Sandboxes that the pool should still create for waiting batches."""
    unsatisfiable: frozenset[Key] = frozenset()
    """Batches that need more at once than the pool can ever have."""


Algorithm = Callable[[tuple[BatchDemand, ...], PoolStock], dict[Key, int]]


def plan(
    waiting: tuple[BatchDemand, ...], stock: PoolStock, *, algorithm: str, now: datetime
) -> AllocationPlan:
    """Return how many sandboxes each batch gets."""
    most = stock.ceiling if stock.limit is None else max(stock.limit, stock.ceiling)
    unsatisfiable = frozenset(
        item.key for item in waiting if item.at_once and item.held + item.at_once > most
    )
    able = tuple(item for item in waiting if item.missing > 0 and item.key not in unsatisfiable)
    ordered = in_order(able, stock.held_by_tenant, now=now)
    grants = algorithm_named(algorithm)(ordered, stock)
    unmet = sum(item.missing for item in able) - sum(grants.values())
    return AllocationPlan(grants=grants, unmet=unmet, unsatisfiable=unsatisfiable)


def in_order(
    waiting: tuple[BatchDemand, ...], held_by_tenant: Mapping[str, int], *, now: datetime
) -> tuple[BatchDemand, ...]:
    """Return the waiting batches in the order of service."""
    queues: dict[tuple[int, str], list[BatchDemand]] = defaultdict(list)
    for item in sorted(waiting, key=lambda item: (item.since, item.key), reverse=True):
        queues[-_urgency(item, now), item.tenant].append(item)
    held = dict(held_by_tenant)
    ordered: list[BatchDemand] = []
    for level in sorted({level for level, _ in queues}):
        own = {tenant: queue for (at, tenant), queue in queues.items() if at == level}
        while own:
            tenant = min(own, key=lambda name: (held.get(name, 0), own[name][-1].since, name))
            item = own[tenant].pop()
            held[tenant] = held.get(tenant, 0) + item.missing
            ordered.append(item)
            if not own[tenant]:
                del own[tenant]
    return tuple(ordered)


def _urgency(item: BatchDemand, now: datetime) -> int:
    waited = max((now - item.since).total_seconds(), 0.0)
    return item.priority + int(waited / AGEING_SECONDS)


def packed(waiting: tuple[BatchDemand, ...], stock: PoolStock) -> dict[Key, int]:
    """Serve the first batch completely, then the next."""
    left = stock.grantable
    grants: dict[Key, int] = {}
    for item in waiting:
        count = min(item.missing, left)
        if count < item.at_once:
            # First in order, but not enough stock yet: what there is stays reserved for it.
            break
        if count:
            grants[item.key] = count
            left -= count
    return grants


def spread(waiting: tuple[BatchDemand, ...], stock: PoolStock) -> dict[Key, int]:
    """Grant every batch one, then every batch a second one, and so on."""
    left = stock.grantable
    grants: dict[Key, int] = {}
    served: list[BatchDemand] = []
    for item in waiting:
        if left < max(item.at_once, 1):
            break
        grants[item.key] = max(item.at_once, 1)
        left -= grants[item.key]
        served.append(item)
    while left and served:
        served = [item for item in served if grants[item.key] < item.missing]
        for item in served[:left]:
            grants[item.key] += 1
            left -= 1
    return grants


ALGORITHMS: dict[str, Algorithm] = {"packed": packed, "spread": spread}


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm of a name."""
    if (found := ALGORITHMS.get(name)) is None:
        known = ", ".join(sorted(ALGORITHMS))
        raise NotFoundError(f"unknown algorithm {name!r}", hint=f"use one of {known}")
    return found
