"""Which member of an environment serves a claim: a pure choice, compared field by field.

In order: it can serve now; its priority; how many are idle; how many more it may have; how many
wait. What is known only from an old snapshot comes last. A comparison of tuples, not a weighted
sum: no number of idle sandboxes outweighs a priority, and no priority outweighs being able to
serve.
"""

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct

from paddock.cache.environments import MemberSnapshot
from paddock.resources.meta import Key

STALE_SECONDS = 45.0
"""A snapshot older than this is believed only when there is nothing newer."""
_UNBOUNDED = 1 << 30


class MemberCandidate(Struct, frozen=True, kw_only=True):
    """One member of an environment, in this cluster or another."""

    cluster: str = ""
    """Empty is this one."""
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
        """Whether it is of this cluster."""
        return not self.cluster

    @property
    def can_serve(self) -> bool:
        """Whether a claim gets a sandbox from it at once."""
        return self.idle > 0

    @property
    def can_grow(self) -> bool:
        """Whether it may have more."""
        return not self.is_saturated and (self.headroom is None or self.headroom > 0)

    @property
    def room(self) -> int:
        """How many sandboxes it may give out in all before any comes back."""
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
    """Make a candidate of a snapshot; `idle` where it is known better."""
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
    """Give what candidates are compared by; the smallest is best."""
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
    """Choose the best; `None` where there is none at all."""
    return min(candidates, key=rank, default=None)


def choose_federated(candidates: Iterable[MemberCandidate]) -> MemberCandidate | None:
    """Choose over clusters: here idle, there idle, here it can grow, there it can; else `None`.

    `None` means to wait here. A stale word of another cluster is worth less than any fresh one,
    and nothing is sent away on the strength of it.
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
