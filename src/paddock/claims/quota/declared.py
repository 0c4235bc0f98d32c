"""Pools and batches of API keys in the ledger: their sandboxes count before they exist.

A pool counts for the most unclaimed sandboxes that it can have; claimed ones count for themselves.
A batch counts for all of its sandboxes, which therefore do not count for themselves. So everything
together never exceeds the quota. Pools and batches that operators create do not count.
"""

import contextlib
from collections.abc import Generator
from functools import reduce
from typing import TypeAlias

from msgspec import Struct

from paddock.claims.caller import Caller
from paddock.claims.quota.ledger import OF_SANDBOXES, Footprint, Ledger, footprint, holders
from paddock.claims.quota.reservations import QuotaSource
from paddock.kit.errors import QuotaExceededError
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import key_of

Declared: TypeAlias = SandboxPool | BatchSandbox


def most_unclaimed(spec: SandboxPoolSpec) -> int:
    """Return the most unclaimed sandboxes that a pool has without demand of batches."""
    band = spec.capacity
    if band is None:
        return spec.replicas or 0
    return min(max(band.buffer_max, band.pool_min), band.pool_max)


def size_of(obj: Declared) -> Footprint:
    """Return what the sandboxes of a pool or batch count for."""
    count = most_unclaimed(obj.spec) if isinstance(obj, SandboxPool) else obj.spec.replicas
    template = obj.spec.template or SandboxTemplateSpec()
    return footprint(template.resources).times(count)


def _lock(obj: Declared) -> str:
    return f"{obj.KIND}:{obj.key}"


class _Write(Struct, eq=False):
    """A write that is under way."""

    size: Footprint
    seen: list[Footprint | None] = []
    """Sizes reported by events in the meantime."""


class DeclaredQuota:
    """The quota of teams and keys that pools and batches of API keys hold."""

    def __init__(self, ledger: Ledger, quotas: QuotaSource) -> None:
        self._ledger = ledger
        self._quotas = quotas
        self._settled: dict[str, Footprint] = {}
        """What the latest write or event of an object says that it needs, by lock."""
        self._writes: dict[str, list[_Write]] = {}
        """The writes that are under way, by lock."""

    def observe(self, old: Declared | None, new: Declared | None) -> None:
        """Apply one event of the informer of pools or batches."""
        obj = new or old
        if obj is None:
            return
        is_counted = new is not None and bool(key_of(new))
        if isinstance(obj, BatchSandbox):
            self._ledger.cover(obj.metadata.uid, is_covered=is_counted)
        size, lock = size_of(obj) if is_counted else None, _lock(obj)
        for write in self._writes.get(lock, ()):
            write.seen.append(size)
        self._settle(lock, size)
        self._count(lock, holders(obj.metadata.namespace, key_of(obj)))

    def check_growth(self, caller: Caller, before: Declared, after: Declared) -> None:
        """Raise `QuotaExceededError` if a key with a quota grows what another key created.

        It counts against the quota of its creator alone, so the writer's would have no effect.
        """
        if key_of(before) == caller.key_id or not self._has_quota(caller):
            return
        old, new = size_of(before), size_of(after)
        if all(new.of(dimension) <= old.of(dimension) for dimension in OF_SANDBOXES):
            return
        raise QuotaExceededError(
            f"{before.KIND} {before.metadata.name!r} counts against the key that created it, and "
            "this key has a quota of its own",
            hint=f"create another {before.KIND}, or let a key without a quota of its own grow it",
        )

    def _has_quota(self, caller: Caller) -> bool:
        team = frozenset(holders(caller.team, ""))
        parties = self._quotas.quotas(caller)
        return any(quota is not None for holder, quota in parties if holder not in team)

    @contextlib.contextmanager
    def reserving(self, obj: Declared, *, dry_run: bool = False) -> Generator[None]:
        """Hold what an object needs while it is written; then what writes and events left it.

        `QuotaExceededError` if the quota of team or key has no room.
        """
        lock, team, write = _lock(obj), obj.metadata.namespace, _Write(size_of(obj))
        parties = self._quotas.quotas(Caller(team, key_of(obj)))
        self._ledger.hold(lock, parties, write.size)
        writes = self._writes.setdefault(lock, [])
        writes.append(write)
        try:
            yield
            if not dry_run:
                self._written(lock, write)
        finally:
            # If a failed write did happen, its event counts it.
            writes.remove(write)
            if not writes:
                self._writes.pop(lock, None)
            self._count(lock, tuple(holder for holder, _ in parties))

    def _written(self, lock: str, write: _Write) -> None:
        """Count what was written, unless its event was seen: a later one may have followed."""
        if write.size in write.seen:
            return
        settled = self._settled.get(lock)
        if write.seen and settled is not None:
            self._settle(lock, _most(settled, write.size))
        else:
            self._settle(lock, write.size)

    def _settle(self, lock: str, size: Footprint | None) -> None:
        if size is None:
            self._settled.pop(lock, None)
        else:
            self._settled[lock] = size

    def _count(self, lock: str, who: tuple[str, ...]) -> None:
        """Hold the most of what an object needs and what writes under way may make it need."""
        sizes = [write.size for write in self._writes.get(lock, ())]
        if (settled := self._settled.get(lock)) is not None:
            sizes.append(settled)
        size = reduce(_most, sizes) if sizes else None
        if size != self._ledger.held(lock):
            self._ledger.set_held(lock, who, size)


def _most(one: Footprint, other: Footprint) -> Footprint:
    return Footprint(
        max(one.cpu_millis, other.cpu_millis),
        max(one.memory_mib, other.memory_mib),
        max(one.count, other.count),
    )
