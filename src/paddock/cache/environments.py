"""Snapshots of each environment's members, from which claims are routed.

The env controller puts a snapshot here at the end of every successful reconcile; the manager's
router reads it. Snapshots of other clusters come from `manager.federation`. Nothing here is
stored: it is derived from the resources.
"""

from collections.abc import Callable, Mapping
from datetime import datetime

from msgspec import Struct

from paddock.resources.meta import Key


class MemberSnapshot(Struct, frozen=True, kw_only=True):
    """One member at one instant."""

    name: str
    pool: Key
    priority: int = 0
    """Lower is tried first."""
    scaling_group: str = "default"
    idle: int = 0
    pending: int = 0
    """Being created."""
    headroom: int | None = 0
    """How many sandboxes it may still add; `None` means no limit."""
    saturated_until: datetime | None = None
    """Until then it cannot grow, despite its headroom."""


class EnvSnapshot(Struct, frozen=True, kw_only=True):
    """One environment's members of one cluster at one instant."""

    env: Key
    cluster: str
    taken_at: datetime
    members: tuple[MemberSnapshot, ...] = ()


class WaitingClaims(Struct, frozen=True):
    """The number of claims that wait for an environment."""

    anywhere: int = 0
    """Claims that accept any scaling group."""
    pinned: Mapping[str, int] = {}
    """Claims by the scaling group that they require."""

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.anywhere + sum(self.pinned.values())


class EnvSnapshots:
    """The newest snapshot of each environment of this cluster."""

    def __init__(self) -> None:
        self._snapshots: dict[Key, EnvSnapshot] = {}
        self._by_pool: dict[Key, Key] = {}
        self._listeners: list[Callable[[Key], None]] = []

    def on_change(self, listener: Callable[[Key], None]) -> None:
        """Call the listener with an environment's key when its snapshot is replaced or removed."""
        self._listeners.append(listener)

    def put(self, snapshot: EnvSnapshot) -> None:
        """Store a new snapshot."""
        self._forget(snapshot.env)
        self._snapshots[snapshot.env] = snapshot
        for member in snapshot.members:
            self._by_pool[member.pool] = snapshot.env
        self._notify(snapshot.env)

    def drop(self, env: Key) -> None:
        """Remove a deleted environment."""
        self._forget(env)
        self._notify(env)

    def get(self, env: Key) -> EnvSnapshot | None:
        """Return an environment's newest snapshot."""
        return self._snapshots.get(env)

    def env_of(self, pool: Key) -> Key | None:
        """Return the environment that a pool is a member of, or `None`."""
        return self._by_pool.get(pool)

    def growth(self, pool: Key, now: datetime) -> int | None:
        """Return how many sandboxes a pool may add now; `None` means no limit."""
        snapshot = self._snapshots.get(self._by_pool.get(pool, pool))
        for member in snapshot.members if snapshot else ():
            if member.pool == pool:
                is_full = member.saturated_until is not None and member.saturated_until > now
                return 0 if is_full else member.headroom
        return 0

    def all(self) -> Mapping[Key, EnvSnapshot]:
        """Return every snapshot; read only."""
        return self._snapshots

    def _forget(self, env: Key) -> None:
        known = self._snapshots.pop(env, None)
        for member in known.members if known else ():
            if self._by_pool.get(member.pool) == env:
                del self._by_pool[member.pool]

    def _notify(self, env: Key) -> None:
        for listener in self._listeners:
            listener(env)
