"""Who gets how many of a pool's ready sandboxes: a pure decision.

Order: priority, which grows with waiting, so that nobody waits for ever; then the tenant who has
least, so that one namespace cannot crowd out another; then age. A batch that wants `minAvailable`
at once gets all of it or nothing, and while it is its turn nobody behind it is served: else small
batches would keep it waiting for ever. One that can never be served is passed over and told so.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime

from msgspec import Struct

from paddock.kit.errors import NotFoundError
from paddock.resources.meta import Key

AGEING_SECONDS = 60.0
"""Waiting so long counts as much as one step of priority."""


class Waiting(Struct, frozen=True, kw_only=True):
    """A batch that wants sandboxes of this pool."""

    key: Key
    tenant: str
    since: datetime
    missing: int
    """Shards without a sandbox."""
    held: int = 0
    """Sandboxes it has already."""
    priority: int = 0
    at_once: int = 0
    """So many together or none; 0 where any number will do."""


class Stock(Struct, frozen=True, kw_only=True):
    """What a pool can give."""

    ready: int
    allocated: int = 0
    ceiling: int = 1 << 31
    """`poolMax`: more than this are never in somebody's hands."""
    limit: int | None = None
    """What the ceiling may become, where somebody raises it on demand; `None`: it stays."""
    held_by_tenant: Mapping[str, int] = {}

    @property
    def grantable(self) -> int:
        """How many can be given out now."""
        return max(min(self.ready, self.ceiling - self.allocated), 0)


class Allotment(Struct, frozen=True, kw_only=True):
    """What was decided."""

    grants: Mapping[Key, int] = {}
    unmet: int = 0
    """Sandboxes that the pool should still make for those who wait."""
    hopeless: frozenset[Key] = frozenset()
    """Want more at once than the pool may ever have."""


Algorithm = Callable[[tuple[Waiting, ...], Stock], dict[Key, int]]


def allot(
    waiting: tuple[Waiting, ...], stock: Stock, *, algorithm: str, now: datetime
) -> Allotment:
    """Decide who gets how many."""
    most = stock.ceiling if stock.limit is None else max(stock.limit, stock.ceiling)
    hopeless = frozenset(
        item.key for item in waiting if item.at_once and item.held + item.at_once > most
    )
    able = tuple(item for item in waiting if item.missing > 0 and item.key not in hopeless)
    ordered = in_order(able, stock.held_by_tenant, now=now)
    grants = algorithm_named(algorithm)(ordered, stock)
    unmet = sum(item.missing for item in able) - sum(grants.values())
    return Allotment(grants=grants, unmet=unmet, hopeless=hopeless)


def in_order(
    waiting: tuple[Waiting, ...], held_by_tenant: Mapping[str, int], *, now: datetime
) -> tuple[Waiting, ...]:
    """Put those who wait into the order in which they are served."""
    queues: dict[tuple[int, str], list[Waiting]] = defaultdict(list)
    for item in sorted(waiting, key=lambda item: (item.since, item.key), reverse=True):
        queues[-_urgency(item, now), item.tenant].append(item)
    held = dict(held_by_tenant)
    ordered: list[Waiting] = []
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


def _urgency(item: Waiting, now: datetime) -> int:
    waited = max((now - item.since).total_seconds(), 0.0)
    return item.priority + int(waited / AGEING_SECONDS)


def packed(waiting: tuple[Waiting, ...], stock: Stock) -> dict[Key, int]:
    """Give the first all it needs, then the next."""
    left = stock.grantable
    grants: dict[Key, int] = {}
    for item in waiting:
        count = min(item.missing, left)
        if count < item.at_once:
            # Its turn, but not enough yet: what there is is kept for it.
            break
        if count:
            grants[item.key] = count
            left -= count
    return grants


def spread(waiting: tuple[Waiting, ...], stock: Stock) -> dict[Key, int]:
    """Give everybody one, then everybody a second one, and so on."""
    left = stock.grantable
    grants: dict[Key, int] = {}
    served: list[Waiting] = []
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
    """Find an algorithm by the name that a pool gives."""
    if (found := ALGORITHMS.get(name)) is None:
        known = ", ".join(sorted(ALGORITHMS))
        raise NotFoundError(f"there is no algorithm {name!r}", hint=f"use one of {known}")
    return found
