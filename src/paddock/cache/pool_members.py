"""Who is in each pool, kept by events, so that a claim and a pool's plan cost the same at any size.

Fed by the Sandbox informer: each event moves one sandbox between standings. `reserve` hands a
ready sandbox to one caller of this process (the first of two locks; the second is the
compare-and-swap on its version). What was taken is out of stock until the next event about it
or until `unreserve`.

Fed by the BatchSandbox informer too: what a batch's status names as its own is allocated, though
nothing is written to the sandbox itself. Of two batches that name one sandbox the first that was
heard of has it. What a vanished batch held stays out of stock until somebody has cleaned it up.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.sandbox import (
    CONDITION_HEALTHY,
    CONDITION_READY,
    LABEL_EVICT,
    LABEL_POOL,
    LABEL_REVISION,
    Phase,
    Sandbox,
)
from paddock.resources.meta import ConditionStatus, Key, condition, controller_of, is_true


class PoolState(StrEnum):
    """What a sandbox is to its pool."""

    CREATING = "creating"
    AVAILABLE = "available"
    LEAVING = "leaving"
    ALLOCATED = "allocated"


def pool_of(sandbox: Sandbox) -> Key | None:
    """Give the pool a sandbox came from."""
    name = sandbox.metadata.labels.get(LABEL_POOL)
    return Key(sandbox.metadata.namespace, name) if name else None


def pool_state(sandbox: Sandbox) -> PoolState:
    """Say what a sandbox is to its pool."""
    if sandbox.spec.claim is not None or controller_of(sandbox) is None:
        return PoolState.ALLOCATED
    if sandbox.spec.recycle or sandbox.status.phase is Phase.RECYCLING:
        return PoolState.LEAVING if sandbox.is_deleting else PoolState.CREATING
    if sandbox.is_deleting or LABEL_EVICT in sandbox.metadata.labels or sandbox.spec.paused:
        return PoolState.LEAVING
    if sandbox.status.phase is Phase.PENDING:
        return PoolState.CREATING
    if sandbox.status.phase is not Phase.RUNNING:
        return PoolState.LEAVING
    healthy = condition(sandbox.status.conditions, CONDITION_HEALTHY)
    if healthy is not None and healthy.status is ConditionStatus.FALSE:
        return PoolState.LEAVING
    if healthy is None and sandbox.spec.template is not None and sandbox.spec.template.probe:
        # Nobody is given what has not yet shown that it is well.
        return PoolState.CREATING
    ready = is_true(sandbox.status.conditions, CONDITION_READY)
    return PoolState.AVAILABLE if ready else PoolState.CREATING


def revision_of(sandbox: Sandbox) -> str:
    """Give the revision of the template it was made from."""
    return sandbox.metadata.labels.get(LABEL_REVISION, "")


class Members:
    """One pool's sandboxes by standing."""

    __slots__ = (
        *("allocated", "available", "creating", "leaving"),
        *("allocated_total", "reserved", "revisions"),
    )

    def __init__(self) -> None:
        self.creating: dict[Key, Sandbox] = {}
        self.available: dict[Key, Sandbox] = {}
        self.leaving: dict[Key, Sandbox] = {}
        self.allocated: dict[Key, Sandbox] = {}
        self.reserved: dict[Key, Sandbox] = {}
        """Available, but promised to a claim that is under way."""
        self.revisions: dict[tuple[PoolState, str], int] = {}
        """How many there are of each standing and revision; taken ones are available ones."""
        self.allocated_total = 0
        """How many went from stock to somebody since this process looks."""

    def count(self, which: PoolState, revision: str) -> int:
        """Say how many of one standing are of one revision."""
        return self.revisions.get((which, revision), 0)

    def tally(self, which: PoolState, revision: str, change: int) -> None:
        """Count one more or one less."""
        left = self.revisions.get((which, revision), 0) + change
        if left:
            self.revisions[which, revision] = left
        else:
            self.revisions.pop((which, revision), None)

    def of(self, which: PoolState) -> dict[Key, Sandbox]:
        """Give the sandboxes of one standing."""
        return {
            PoolState.CREATING: self.creating,
            PoolState.AVAILABLE: self.available,
            PoolState.LEAVING: self.leaving,
            PoolState.ALLOCATED: self.allocated,
        }[which]

    @property
    def is_empty(self) -> bool:
        """Say whether nothing is left of it."""
        return not (
            self.creating or self.available or self.leaving or self.allocated or self.reserved
        )


class PoolMembers:
    """Every pool's members."""

    def __init__(self, *, spread: int = 1) -> None:
        self._pools: dict[Key, Members] = {}
        self._where: dict[Key, tuple[Key, PoolState, str]] = {}
        self._listeners: list[Callable[[Key], None]] = []
        self._spread = spread
        """Replicas that take from the same stock begin at different places."""
        self._turn = 0
        self._holders: dict[Key, tuple[Key, str]] = {}
        """Which batch has a sandbox, and the sandbox's uid."""
        self._held: dict[Key, dict[Key, str]] = {}
        """The sandboxes that each batch names, with their uids."""
        self._orphans: dict[Key, dict[Key, str]] = {}
        """What vanished batches held and nobody has cleaned up."""

    # ---- batches -------------------------------------------------------------------------

    def observe_batch(self, old: BatchSandbox | None, new: BatchSandbox | None) -> None:
        """Take in one event of the BatchSandbox informer."""
        batch = new or old
        if batch is None:
            return
        if old and new and old.status.allocations is new.status.allocations:
            return
        key = batch.key
        before = self._held.pop(key, {})
        after = {} if new is None else _named(new)
        if after:
            self._held[key] = after
        if new is None and before:
            # Whoever took its finalizer off left these as they were used.
            kept = {name: uid for name, uid in before.items() if self.holder(name) == key}
            self._orphans.setdefault(key, {}).update(kept)
            return
        for name, uid in before.items():
            if after.get(name) != uid and self._holders.get(name) == (key, uid):
                del self._holders[name]
                self._place_again(name)
        for name, uid in after.items():
            if before.get(name) != uid and name not in self._holders:
                self._holders[name] = (key, uid)
                self._place_again(name)

    def holder(self, sandbox: Key) -> Key | None:
        """Say which batch has a sandbox."""
        found = self._holders.get(sandbox)
        return None if found is None else found[0]

    def orphans(self, batch: Key) -> dict[Key, str]:
        """Give what a vanished batch held and nobody has cleaned up, with uids."""
        return dict(self._orphans.get(batch, {}))

    def clear_orphan(self, batch: Key, sandbox: Key) -> None:
        """Say that a sandbox of a vanished batch is clean again, or gone."""
        left = self._orphans.get(batch, {})
        left.pop(sandbox, None)
        if not left:
            self._orphans.pop(batch, None)
        if self.holder(sandbox) == batch and sandbox not in self._held.get(batch, {}):
            del self._holders[sandbox]
            self._place_again(sandbox)

    def _place_again(self, key: Key) -> None:
        where = self._where.get(key)
        if where is None:
            return
        members = self._pools[where[0]]
        sandbox = members.of(where[1]).get(key) or members.reserved.get(key)
        if sandbox is not None:
            self.observe(sandbox, sandbox)

    def _state_of(self, sandbox: Sandbox) -> PoolState:
        held = self._holders.get(sandbox.key)
        if held is not None and held[1] == sandbox.metadata.uid:
            return PoolState.ALLOCATED
        return pool_state(sandbox)

    # ---- sandboxes -----------------------------------------------------------------------

    def on_change(self, listener: Callable[[Key], None]) -> None:
        """Call with a pool's key whenever its members change."""
        self._listeners.append(listener)

    def members(self, pool: Key) -> Members:
        """Give a pool's members; read only."""
        return self._pools.get(pool) or Members()

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Take in one event of the Sandbox informer."""
        sandbox = new or old
        if sandbox is None:
            return
        key = sandbox.key
        before = self._where.pop(key, None)
        if before is not None:
            members = self._pools[before[0]]
            members.of(before[1]).pop(key, None)
            members.reserved.pop(key, None)
            members.tally(before[1], before[2], -1)
        pool = pool_of(new) if new is not None else None
        if new is not None and pool is not None:
            which, revision = self._state_of(new), revision_of(new)
            members = self._pools.setdefault(pool, Members())
            members.of(which)[key] = new
            members.tally(which, revision, +1)
            if before is not None and before[1] is not which is PoolState.ALLOCATED:
                members.allocated_total += 1
            self._where[key] = (pool, which, revision)
        self._tell(before[0] if before else None, pool)

    def _tell(self, *pools: Key | None) -> None:
        for pool in {pool for pool in pools if pool is not None}:
            if (members := self._pools.get(pool)) is not None and members.is_empty:
                del self._pools[pool]
            for listener in self._listeners:
                listener(pool)

    def reserve(self, pool: Key, revision: str | None = None) -> Sandbox | None:
        """Take one available sandbox out of stock: of this revision first, else of any."""
        members = self._pools.get(pool)
        if members is None or not members.available:
            return None
        sandbox = self._choose(members, revision)
        del members.available[sandbox.key]
        members.reserved[sandbox.key] = sandbox
        return sandbox

    def _choose(self, members: Members, revision: str | None) -> Sandbox:
        self._turn += 1
        start = self._turn % self._spread
        first: Sandbox | None = None
        for sandbox in islice(members.available.values(), start, start + 32):
            if revision is None or revision_of(sandbox) == revision:
                return sandbox
            first = first or sandbox
        return first or next(iter(members.available.values()))

    def reserve_exact(self, key: Key) -> bool:
        """Take this very sandbox out of stock, to let it go; false if it is not to be had now."""
        where = self._where.get(key)
        if where is None or where[1] is not PoolState.AVAILABLE:
            # What is in the making or on its way out is offered to nobody.
            return where is not None and where[1] is not PoolState.ALLOCATED
        members = self._pools[where[0]]
        sandbox = members.available.pop(key, None)
        if sandbox is None:
            return False
        members.reserved[key] = sandbox
        return True

    def unreserve(self, key: Key) -> None:
        """Put a sandbox that was taken but not claimed back into stock."""
        where = self._where.get(key)
        if where is None or where[1] is not PoolState.AVAILABLE:
            return
        members = self._pools[where[0]]
        sandbox = members.reserved.pop(key, None)
        if sandbox is not None:
            members.available[key] = sandbox
            self._tell(where[0])

    def stale(
        self, pool: Key, *, revision: str, max_idle_age_seconds: int | None, now: datetime
    ) -> Iterator[Sandbox]:
        """Go through available sandboxes that should be replaced, oldest first."""
        limit = None if max_idle_age_seconds is None else timedelta(seconds=max_idle_age_seconds)
        members = self.members(pool)
        others = len(members.available) + len(members.reserved)
        others -= members.count(PoolState.AVAILABLE, revision)
        if not others and limit is None:
            # The usual case costs nothing: all are of this revision, and age does not matter.
            return
        for sandbox in sorted(members.available.values(), key=_born):
            if _is_older(sandbox, limit, now) or revision_of(sandbox) != revision:
                yield sandbox


def _named(batch: BatchSandbox) -> dict[Key, str]:
    return {
        Key(item.namespace or batch.metadata.namespace, item.sandbox): item.uid
        for item in batch.status.allocations
        if item.sandbox
    }


def _born(sandbox: Sandbox) -> tuple[float, str]:
    created = sandbox.metadata.creation_timestamp
    return (created.timestamp() if created else 0.0, sandbox.metadata.name)


def _is_older(sandbox: Sandbox, limit: timedelta | None, now: datetime) -> bool:
    created = sandbox.metadata.creation_timestamp
    return limit is not None and created is not None and now - created >= limit
