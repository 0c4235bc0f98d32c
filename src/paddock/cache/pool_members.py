"""The members of each pool, updated by events: claims and pool plans cost the same at any size.

Sandbox events move one sandbox between states. `reserve` gives an available sandbox to one caller
of this process (the first of two locks; the second is the compare-and-swap on its version). A
reserved sandbox is not available until its next event or until `unreserve`.

BatchSandbox events count too: sandboxes that a batch's status names are allocated, though nothing
is written to the sandbox. If two batches name one sandbox, the first one observed has it. The
sandboxes of a deleted batch stay out of stock until they are cleaned up.
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
    """The state of a sandbox within its pool."""

    CREATING = "creating"
    RECYCLING = "recycling"
    """Returned to the pool, and not reset yet."""
    AVAILABLE = "available"
    UNUSABLE = "unusable"
    """Unclaimed, and evicted, paused, unhealthy, failed or being deleted."""
    ALLOCATED = "allocated"


def pool_of(sandbox: Sandbox) -> Key | None:
    """Return the pool that a sandbox came from, or `None`."""
    name = sandbox.metadata.labels.get(LABEL_POOL)
    return Key(sandbox.metadata.namespace, name) if name else None


def pool_state(sandbox: Sandbox) -> PoolState:
    """Return the state of a sandbox within its pool."""
    if sandbox.spec.claim is not None or controller_of(sandbox) is None:
        return PoolState.ALLOCATED
    if sandbox.spec.recycle or sandbox.status.phase is Phase.RECYCLING:
        is_over = sandbox.is_deleting or sandbox.status.phase in (Phase.FAILED, Phase.SUCCEEDED)
        return PoolState.UNUSABLE if is_over else PoolState.RECYCLING
    if sandbox.is_deleting or LABEL_EVICT in sandbox.metadata.labels or sandbox.spec.paused:
        return PoolState.UNUSABLE
    if sandbox.status.phase is Phase.PENDING:
        return PoolState.CREATING
    if sandbox.status.phase is not Phase.RUNNING:
        return PoolState.UNUSABLE
    healthy = condition(sandbox.status.conditions, CONDITION_HEALTHY)
    if healthy is not None and healthy.status is ConditionStatus.FALSE:
        return PoolState.UNUSABLE
    if healthy is None and sandbox.spec.template is not None and sandbox.spec.template.probe:
        # With a probe, a sandbox is not available before its first success.
        return PoolState.CREATING
    ready = is_true(sandbox.status.conditions, CONDITION_READY)
    return PoolState.AVAILABLE if ready else PoolState.CREATING


def revision_of(sandbox: Sandbox) -> str:
    """Return the revision of its template."""
    return sandbox.metadata.labels.get(LABEL_REVISION, "")


class Members:
    """One pool's sandboxes by state."""

    __slots__ = (
        *("allocated", "available", "creating", "recycling", "unusable"),
        *("allocated_total", "reserved", "revisions"),
    )

    def __init__(self) -> None:
        self.creating: dict[Key, Sandbox] = {}
        self.recycling: dict[Key, Sandbox] = {}
        self.available: dict[Key, Sandbox] = {}
        self.unusable: dict[Key, Sandbox] = {}
        self.allocated: dict[Key, Sandbox] = {}
        self.reserved: dict[Key, Sandbox] = {}
        """Available, but reserved for a claim in flight."""
        self.revisions: dict[tuple[PoolState, str], int] = {}
        """Sandboxes by state and revision; reserved ones count as available."""
        self.allocated_total = 0
        """How many became allocated since this process started."""

    def count(self, state: PoolState, revision: str) -> int:
        """Return the number of sandboxes of one state and revision."""
        return self.revisions.get((state, revision), 0)

    def tally(self, state: PoolState, revision: str, change: int) -> None:
        """Adjust the count of a state and revision."""
        left = self.revisions.get((state, revision), 0) + change
        if left:
            self.revisions[state, revision] = left
        else:
            self.revisions.pop((state, revision), None)

    def of(self, state: PoolState) -> dict[Key, Sandbox]:
        """Return the sandboxes of one state."""
        return {
            PoolState.CREATING: self.creating,
            PoolState.RECYCLING: self.recycling,
            PoolState.AVAILABLE: self.available,
            PoolState.UNUSABLE: self.unusable,
            PoolState.ALLOCATED: self.allocated,
        }[state]

    @property
    def is_empty(self) -> bool:
        """Whether it has no sandboxes."""
        return not (self.reserved or any(self.of(state) for state in PoolState))


class PoolMembers:
    """The members of every pool."""

    def __init__(self, *, spread: int = 1) -> None:
        self._pools: dict[Key, Members] = {}
        self._where: dict[Key, tuple[Key, PoolState, str]] = {}
        self._listeners: list[Callable[[Key], None]] = []
        self._spread = spread
        """Replicas that reserve from the same stock start at different positions."""
        self._turn = 0
        self._holders: dict[Key, tuple[Key, str]] = {}
        """The batch that holds each sandbox, with the sandbox's uid."""
        self._held: dict[Key, dict[Key, str]] = {}
        """The sandboxes that each batch names, with their uids."""
        self._orphans: dict[Key, dict[Key, str]] = {}
        """Sandboxes of deleted batches that are not cleaned up."""

    # ---- batches -------------------------------------------------------------------------

    def observe_batch(self, old: BatchSandbox | None, new: BatchSandbox | None) -> None:
        """Handle one event of the BatchSandbox informer."""
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
            # The batch was deleted without its finalizer, so these are still as they were used.
            kept = {name: uid for name, uid in before.items() if self.holder(name) == key}
            self._orphans.setdefault(key, {}).update(kept)
            return
        for name, uid in before.items():
            if after.get(name) != uid and self._holders.get(name) == (key, uid):
                del self._holders[name]
                self._reclassify(name)
        for name, uid in after.items():
            if before.get(name) != uid and name not in self._holders:
                self._holders[name] = (key, uid)
                self._reclassify(name)

    def holder(self, sandbox: Key) -> Key | None:
        """Return the batch that holds a sandbox, or `None`."""
        found = self._holders.get(sandbox)
        return None if found is None else found[0]

    def orphans(self, batch: Key) -> dict[Key, str]:
        """Return the uids of a deleted batch's sandboxes that are not cleaned up."""
        return dict(self._orphans.get(batch, {}))

    def clear_orphan(self, batch: Key, sandbox: Key) -> None:
        """Record that a sandbox of a deleted batch is cleaned up or deleted."""
        left = self._orphans.get(batch, {})
        left.pop(sandbox, None)
        if not left:
            self._orphans.pop(batch, None)
        if self.holder(sandbox) == batch and sandbox not in self._held.get(batch, {}):
            del self._holders[sandbox]
            self._reclassify(sandbox)

    def _reclassify(self, key: Key) -> None:
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
        """Call the listener with a pool's key when its members change."""
        self._listeners.append(listener)

    def members(self, pool: Key) -> Members:
        """Return a pool's members; read-only."""
        return self._pools.get(pool) or Members()

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Handle one event of the Sandbox informer."""
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
        self._notify(before[0] if before else None, pool)

    def _notify(self, *pools: Key | None) -> None:
        for pool in {pool for pool in pools if pool is not None}:
            if (members := self._pools.get(pool)) is not None and members.is_empty:
                del self._pools[pool]
            for listener in self._listeners:
                listener(pool)

    def reserve(self, pool: Key, revision: str | None = None) -> Sandbox | None:
        """Reserve an available sandbox, of this revision if possible; `None` if there is none."""
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
        """Reserve this sandbox, for deletion; false if it is reserved or allocated."""
        where = self._where.get(key)
        if where is None or where[1] is not PoolState.AVAILABLE:
            # Sandboxes that are created, reset or unusable are never given to a claim.
            return where is not None and where[1] is not PoolState.ALLOCATED
        members = self._pools[where[0]]
        sandbox = members.available.pop(key, None)
        if sandbox is None:
            return False
        members.reserved[key] = sandbox
        return True

    def unreserve(self, key: Key) -> None:
        """Make a reserved sandbox that was not claimed available again."""
        where = self._where.get(key)
        if where is None or where[1] is not PoolState.AVAILABLE:
            return
        members = self._pools[where[0]]
        sandbox = members.reserved.pop(key, None)
        if sandbox is not None:
            members.available[key] = sandbox
            self._notify(where[0])

    def stale(
        self, pool: Key, *, revision: str, max_idle_age_seconds: int | None, now: datetime
    ) -> Iterator[Sandbox]:
        """Yield available sandboxes that should be replaced, oldest first."""
        limit = None if max_idle_age_seconds is None else timedelta(seconds=max_idle_age_seconds)
        members = self.members(pool)
        others = len(members.available) + len(members.reserved)
        others -= members.count(PoolState.AVAILABLE, revision)
        if not others and limit is None:
            # The usual case is cheap: all are of this revision, and there is no age limit.
            return
        for sandbox in sorted(members.available.values(), key=_created_at):
            if _is_older(sandbox, limit, now) or revision_of(sandbox) != revision:
                yield sandbox


def _named(batch: BatchSandbox) -> dict[Key, str]:
    return {
        Key(item.namespace or batch.metadata.namespace, item.sandbox): item.uid
        for item in batch.status.allocations
        if item.sandbox
    }


def _created_at(sandbox: Sandbox) -> tuple[float, str]:
    created = sandbox.metadata.creation_timestamp
    return (created.timestamp() if created else 0.0, sandbox.metadata.name)


def _is_older(sandbox: Sandbox, limit: timedelta | None, now: datetime) -> bool:
    created = sandbox.metadata.creation_timestamp
    return limit is not None and created is not None and now - created >= limit
