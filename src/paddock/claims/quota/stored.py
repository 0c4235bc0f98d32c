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
    who = checkpoint_holders(checkpoint)
    return Holding(who, checkpoint.status.size_bytes) if who else None


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

    def reserve(self, key: HoldingKey, who: tuple[str, ...], size: int) -> None:
        """Reserve an estimate before the work; after `QuotaExceededError` nothing is reserved."""
        self.release(key)
        # Even an estimate of nothing needs room: a full quota refuses all work.
        self.check(who, max(size, 1))
        if who:
            self._reserved[key] = Holding(who, size)
            self._add(self._reserved[key], +1)

    def settle(self, key: HoldingKey, size: int) -> None:
        """Reserve the real size instead of the estimate; `QuotaExceededError` reserves nothing."""
        reserved = self._reserved.get(key)
        if reserved is None:
            return
        self.release(key)
        self.check(reserved.holders, size)
        self._reserved[key] = Holding(reserved.holders, size)
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
        if before is not None:
            self._add(before, -1)
            del self._holdings[key]
        if holding is not None:
            # The result of the work counts from here on, not the reservation.
            self.release(key)
            self._holdings[key] = holding
            self._add(holding, +1)

    def _add(self, holding: Holding, sign: int) -> None:
        for holder in holding.holders:
            total = self._sums.get(holder, 0) + sign * holding.size_bytes
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
