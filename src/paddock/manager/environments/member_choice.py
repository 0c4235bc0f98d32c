"""Chooses the member of an environment that serves a claim. Pure.

Members are compared by, in order: can serve now, priority, idle sandboxes, headroom, queue length.
Members from a stale snapshot come last. This compares tuples, not weighted sums: no number of idle
sandboxes outweighs a priority, and no priority outweighs being able to serve.
"""

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct

from paddock.cache.environments import MemberSnapshot
from paddock.resources.meta import Key

STALE_SECONDS = 45.0
"""A snapshot older than this is used only if there is no fresher one."""
_UNBOUNDED = 1 << 30


class MemberCandidate(Struct, frozen=True, kw_only=True):
    """One member of an environment, in this cluster or another."""

    cluster: str = ""
    """Empty: this cluster."""
    name: str = ""
    pool: Key = Key("", "")
    priority: int = 0
    scaling_group: str = "default"
    idle: int = 0
    pending: int = 0
    headroom: int | None = 0
    queue: int = 0
    is_saturated: bool = False
    is_stale: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it belongs to this cluster."""
        return not self.cluster

    @property
    def can_serve(self) -> bool:
        """Whether it has an idle sandbox."""
        return self.idle > 0

    @property
    def can_grow(self) -> bool:
        """Whether it may scale up."""
        return not self.is_saturated and (self.headroom is None or self.headroom > 0)

    @property
    def room(self) -> int:
        """How many sandboxes it can hand out before any is returned."""
        more = _UNBOUNDED if self.headroom is None else self.headroom
        return self.idle + self.pending + (0 if self.is_saturated else more)


def candidate(
    member: MemberSnapshot,
    *,
    now: datetime,
    taken_at: datetime,
    idle: int | None = None,
    queue: int = 0,
    cluster: str = "",
) -> MemberCandidate:
    """Return the candidate of a snapshot; `idle` replaces the snapshot's count."""
    until = member.saturated_until
    return MemberCandidate(
        cluster=cluster,
        name=member.name,
        pool=member.pool,
        priority=member.priority,
        scaling_group=member.scaling_group,
        idle=member.idle if idle is None else idle,
        pending=member.pending,
        headroom=member.headroom,
        queue=queue,
        is_saturated=until is not None and until > now,
        is_stale=(now - taken_at).total_seconds() > STALE_SECONDS,
    )


def rank(item: MemberCandidate) -> tuple[bool, bool, bool, int, int, int, int, str, Key]:
    """Return the sort key of a candidate; the smallest is best."""
    headroom = _UNBOUNDED if item.headroom is None else item.headroom
    return (
        item.is_stale,
        not item.can_serve,
        not (item.can_serve or item.can_grow),
        item.priority,
        -item.idle,
        -headroom,
        item.queue,
        item.cluster,
        item.pool,
    )


def choose(candidates: Iterable[MemberCandidate]) -> MemberCandidate | None:
    """Return the best candidate; `None` if there are none."""
    return min(candidates, key=rank, default=None)


def choose_federated(candidates: Iterable[MemberCandidate]) -> MemberCandidate | None:
    """Choose among clusters: idle here, idle there, can grow here, can grow there; else `None`.

    `None` means to wait here. No claim is forwarded because of a stale snapshot.
    """
    known = tuple(item for item in candidates if item.is_local or not item.is_stale)
    steps = (
        [item for item in known if item.is_local and item.can_serve],
        [item for item in known if not item.is_local and item.can_serve],
        [item for item in known if item.is_local and item.can_grow],
        [item for item in known if not item.is_local and item.can_grow],
    )
    for step in steps:
        if step:
            return choose(step)
    return None
