"""Stored bytes by team and key: everything that is kept on disk counts in one dimension.

What is stored is an object of the store that has a size in its status, so the usage is computed
from the store and never from a counter of its own: `watch` subscribes to the informer of a kind,
with a function that returns what one object holds. A further kind needs such a function and
nothing else.

Work that stores something reserves an estimate first and settles the real size before it writes
its result. Both are refused beyond the quota, so that the sum of what is stored cannot exceed it.
One process decides for all: the one that runs the controller of the kind.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

from msgspec import Struct

from paddock.cache.checks import FREE_STORED_BYTES
from paddock.claims.quota.ledger import Dimension, QuotaLimit, counted_claim, holders
from paddock.claims.quota.reservations import QuotaSource
from paddock.engine.informer import Informer
from paddock.kit import metrics
from paddock.kit.errors import QuotaExceededError
from paddock.resources import quantity
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Resource

TEMPORARY_SECONDS = 60
"""A checkpoint that is deleted within this time of its completion does not count: forks have such
checkpoints. The reserve of the disk bounds them."""
_STORED = metrics.gauge(
    "paddock_stored_bytes", "Stored bytes that count towards the quota of a team.", ("team",)
)

R = TypeVar("R", bound=Resource)
HoldingKey: TypeAlias = tuple[str, str]
"""Kind and uid of a stored object."""


class Holding(Struct, frozen=True):
    """The bytes that one object holds on disk, and the holders of the quotas they count for."""

    holders: tuple[str, ...]
    size_bytes: int
    base: HoldingKey | None = None
    """The object with which it shares bytes on the disk. It may be deleted."""
    shared_bytes: int = 0
    """They count once for all objects of a holder that have this base, and for the base itself."""


def checkpoint_holders(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the holders that a checkpoint counts for; empty if it is temporary."""
    ttl = checkpoint.spec.ttl_seconds_after_finished
    if ttl is not None and ttl <= TEMPORARY_SECONDS:
        return ()
    owner = checkpoint.spec.owner or checkpoint.metadata.namespace
    return holders(owner, checkpoint.spec.key_id)


def checkpoint_holding(checkpoint: Checkpoint) -> Holding | None:
    """Return what a complete checkpoint holds: files and memory, as `status.sizeBytes` says."""
    if checkpoint.status.phase is not CheckpointPhase.SUCCEEDED:
        return None
    who, status = checkpoint_holders(checkpoint), checkpoint.status
    base = (Checkpoint.KIND, status.base_uid) if status.base_uid else None
    shared = min(status.shared_bytes, status.size_bytes)
    return Holding(who, status.size_bytes, base, shared) if who else None


def sandbox_holding(sandbox: Sandbox) -> Holding | None:
    """Return what a claimed, hibernated sandbox holds: its stored memory."""
    if not sandbox.status.stored_bytes or (claim := counted_claim(sandbox)) is None:
        return None
    return Holding(holders(claim.owner, claim.key_id), sandbox.status.stored_bytes)


class StoredLedger:
    """Stored bytes and reservations, by holder."""

    def __init__(self, quotas: QuotaSource) -> None:
        self._quotas = quotas
        self._holdings: dict[HoldingKey, Holding] = {}
        self._sharing: dict[tuple[str, HoldingKey | None], dict[HoldingKey, int]] = {}
        """By holder and base: the objects that share bytes with the base, and how many."""
        self._reserved: dict[HoldingKey, Holding] = {}
        self._sums: dict[str, int] = {}

    def watch(self, informer: Informer[R], holding_of: Callable[[R], Holding | None]) -> None:
        """Count the objects of one kind; each counts until its deletion is written."""

        def observe(old: R | None, new: R | None) -> None:
            obj = new if new is not None else old
            if obj is None:
                return
            key = (obj.KIND, obj.metadata.uid)
            if new is None or new.is_deleting:
                self._count(key, None)
                self.release(key)
            else:
                self._count(key, holding_of(new))

        informer.subscribe(observe)

    def used(self, holder: str) -> int:
        """Return the bytes that count for a holder, reservations included."""
        return self._sums.get(holder, 0)

    def limit(self, holder: str) -> int | None:
        """Return the quota of a holder in bytes; `None`: it has none."""
        found = self._limit(holder)
        return found.limit if found is not None else None

    def is_limited(self, who: Iterable[str]) -> bool:
        """Whether one of the holders has a quota."""
        return any(self._limit(holder) is not None for holder in who)

    def check(self, who: Iterable[str], size: int) -> None:
        """Raise `QuotaExceededError` if so many bytes more exceed a quota."""
        for holder in who:
            limit = self._limit(holder)
            if limit is not None and self.used(holder) + size > limit.limit:
                raise _exceeded(holder, limit, used=self.used(holder), needed=size)

    def reserve(
        self,
        key: HoldingKey,
        who: tuple[str, ...],
        size: int,
        base: HoldingKey | None = None,
        shared: int = 0,
    ) -> None:
        """Reserve an estimate before the work; after `QuotaExceededError` nothing is reserved.

        So many bytes of it are `shared` with the object `base`.
        """
        self.release(key)
        if not who:
            return
        wanted = Holding(who, size, base, min(shared, size))
        net = max(self._net(wanted, holder) for holder in who)
        # Even an estimate of nothing needs room: a full quota refuses all work.
        self.check(who, max(net, 1))
        self._hold(key, who, net)

    def settle(
        self, key: HoldingKey, size: int, base: HoldingKey | None = None, shared: int = 0
    ) -> None:
        """Reserve the real size instead of the estimate; `QuotaExceededError` reserves nothing."""
        reserved = self._reserved.get(key)
        if reserved is None:
            return
        self.release(key)
        stored = Holding(reserved.holders, size, base, min(shared, size))
        net = max(self._net(stored, holder) for holder in reserved.holders)
        self.check(reserved.holders, net)
        self._hold(key, reserved.holders, net)

    def _hold(self, key: HoldingKey, who: tuple[str, ...], size: int) -> None:
        """Count a reservation: as much until it is released, whatever happens to its base."""
        self._reserved[key] = Holding(who, size)
        self._add(self._reserved[key], +1)

    def release(self, key: HoldingKey) -> None:
        """End a reservation: the work has failed, or its result was observed."""
        reserved = self._reserved.pop(key, None)
        if reserved is not None:
            self._add(reserved, -1)

    def _limit(self, holder: str) -> QuotaLimit | None:
        quota = self._quotas.quota_of(holder)
        stored = (
            limit
            for limit in (quota.limits if quota else ())
            if limit.dimension is Dimension.STORED
        )
        return min(stored, key=lambda limit: limit.limit, default=None)

    def _count(self, key: HoldingKey, holding: Holding | None) -> None:
        before = self._holdings.get(key)
        if before == holding:
            return
        if holding is not None:
            # The result of the work counts from here on, not the reservation.
            self.release(key)
        changed = [one for one in (before, holding) if one is not None]
        groups = {
            (holder, base)
            for one in changed
            for holder in one.holders
            for base in (key, one.base)
            if base is not None
        }
        # As a base, the object also determines whether others count for what they share with it.
        for holder, base in groups:
            self._add_to(holder, -self._shared_by(holder, base))
        if before is not None:
            self._forget(key, before)
        if holding is not None:
            self._remember(key, holding)
        for holder, base in groups:
            self._add_to(holder, self._shared_by(holder, base))

    def _forget(self, key: HoldingKey, holding: Holding) -> None:
        del self._holdings[key]
        self._add(holding, -1)
        for holder in holding.holders if holding.base else ():
            group = self._sharing[holder, holding.base]
            del group[key]
            if not group:
                del self._sharing[holder, holding.base]

    def _remember(self, key: HoldingKey, holding: Holding) -> None:
        self._holdings[key] = holding
        self._add(holding, +1)
        for holder in holding.holders if holding.base else ():
            self._sharing.setdefault((holder, holding.base), {})[key] = holding.shared_bytes

    def _shared_by(self, holder: str, base: HoldingKey | None) -> int:
        """Return what objects share with their base, for a holder that does not have the base."""
        there = self._holdings.get(base) if base is not None else None
        if there is not None and holder in there.holders:
            return 0
        return max(self._sharing.get((holder, base), {}).values(), default=0)

    def _net(self, holding: Holding, holder: str) -> int:
        """Return the bytes by which a new object raises the usage of a holder."""
        base, shared = holding.base, holding.shared_bytes
        if base is None:
            return holding.size_bytes
        there = self._holdings.get(base)
        has_base = there is not None and holder in there.holders
        group = 0 if has_base else max(shared - self._shared_by(holder, base), 0)
        return holding.size_bytes - shared + group

    def _add(self, holding: Holding, sign: int) -> None:
        own = holding.size_bytes - (holding.shared_bytes if holding.base else 0)
        for holder in holding.holders:
            self._add_to(holder, sign * own)

    def _add_to(self, holder: str, size: int) -> None:
        total = self._sums.get(holder, 0) + size
        kind, _, name = holder.partition(":")
        if total:
            self._sums[holder] = total
        else:
            self._sums.pop(holder, None)
        if kind == "team":
            _STORED.labels(name).set(total)


def _exceeded(holder: str, limit: QuotaLimit, *, used: int, needed: int) -> QuotaExceededError:
    return QuotaExceededError(
        f"{holder.replace(':', ' ')} has {quantity.shown_bytes(used)} of "
        f"{quantity.shown_bytes(limit.limit)} {limit.dimension}; "
        f"this needs {quantity.shown_bytes(needed)}",
        hint=FREE_STORED_BYTES,
    )
