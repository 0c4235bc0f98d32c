"""The ledger: usage of quotas by teams and keys, with strict limits.

It counts every claimed sandbox once, by its lock, until its deletion is written: the processes of
a killed sandbox may still be ending when its place is free. A reservation is entered before the
store is written, so that two claims in flight cannot both take the last place; the informer's event
for that lock confirms it. A write whose outcome is unknown keeps its reservation until the event or
a read of the store resolves it.

Where several processes serve, each sandbox also counts for the account of the process that
claimed or resumed it; `share_manager` limits the accounts.

What an API key declares counts before it exists: unclaimed sandboxes of pools, and batches
(`declared`).
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from paddock.cache.states import is_running_or_pausing
from paddock.kit.errors import QuotaExceededError
from paddock.resources import quantity
from paddock.resources.default_limits import DEFAULT_CPU_MILLIS, DEFAULT_MEMORY_BYTES
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox
from paddock.resources.kinds.template import Resources


class Dimension(StrEnum):
    """A counted amount."""

    COUNT = "sandbox.count"
    CPU = "limits.cpu"
    """In thousandths of a core."""
    MEMORY = "limits.memory"
    """In MiB."""
    STORED = "stored.bytes"
    """Bytes on disk: checkpoints, and the memory of hibernated sandboxes. See `stored`."""


OF_SANDBOXES = (Dimension.COUNT, Dimension.CPU, Dimension.MEMORY)
"""The dimensions in which claims count; the others are no concern of claims and resumes."""


class QuotaScope(StrEnum):
    """The sandboxes that a limit counts."""

    ALL = "all"
    RUNNING = "running"
    """Paused sandboxes do not count; those that are being paused do."""


class QuotaLimit(Struct, frozen=True):
    """The maximum of one dimension and scope."""

    dimension: Dimension
    scope: QuotaScope
    limit: int


class Quota(Struct, frozen=True):
    """All limits of one team or key."""

    limits: tuple[QuotaLimit, ...] = ()


class Footprint(Struct, frozen=True):
    """The amounts that one sandbox, or a pool of them, counts for."""

    cpu_millis: int
    memory_mib: int
    count: int = 1

    def times(self, count: int) -> "Footprint":
        """Return the footprint of so many of these."""
        return Footprint(self.cpu_millis * count, self.memory_mib * count, self.count * count)

    def of(self, dimension: Dimension) -> int:
        """Return the amount in one dimension."""
        if dimension is Dimension.COUNT:
            return self.count
        return self.cpu_millis if dimension is Dimension.CPU else self.memory_mib


class _Entry(Struct):
    holders: tuple[str, ...]
    footprint: Footprint
    running: bool
    confirmed: bool
    account: str = ""
    """The account whose share it counts for."""
    runner: str = ""
    """The account whose share it counts for while it runs."""
    resuming: bool = False
    """Counted as running before the resume is written."""


def footprint(resources: Resources) -> Footprint:
    """Return the footprint of a sandbox with these limits."""
    cpu = quantity.millis(resources.cpu) if resources.cpu else DEFAULT_CPU_MILLIS
    memory = quantity.whole(resources.memory) if resources.memory else DEFAULT_MEMORY_BYTES
    return Footprint(cpu, quantity.mebibytes(memory))


def resources_of(sandbox: Sandbox) -> Resources:
    """Return the limits that a sandbox has or will have."""
    if sandbox.spec.resources is not None:
        return sandbox.spec.resources
    if sandbox.spec.template is not None:
        return sandbox.spec.template.resources
    return sandbox.status.resources


def counted_claim(sandbox: Sandbox) -> ClaimIdentity | None:
    """Return the claim that a sandbox counts for; `None` if it is unclaimed or being deleted.

    A deletion is never undone, so the usage of a claim can only end by it.
    """
    return None if sandbox.is_deleting else sandbox.spec.claim


def holders(team: str, key_id: str) -> tuple[str, ...]:
    """Return the holders whose quotas a claim of this team and key counts against."""
    return (f"team:{team}", f"key:{key_id}") if key_id else (f"team:{team}",)


UsageKey: TypeAlias = tuple[str, Dimension, QuotaScope]
"""Holder, dimension and scope: the amounts with the same key are summed."""


class Ledger:
    """Usage and reservations by holder, dimension and scope."""

    def __init__(self, account: str = "") -> None:
        self.account = account
        """The account of this process; empty if it serves alone."""
        self._entries: dict[str, _Entry] = {}
        self._sums: dict[UsageKey, int] = {}
        self._accounts: dict[UsageKey, dict[str, int]] = {}
        self._pending: set[str] = set()
        """Locks that are reserved and not confirmed yet."""
        self._covered: set[str] = set()
        """UIDs of batches that count as a whole."""

    def used(self, holder: str, dimension: Dimension, scope: QuotaScope) -> int:
        """Return the usage of a holder, reservations included."""
        return self._sums.get((holder, dimension, scope), 0)

    def reserve(
        self,
        lock: str,
        who: Iterable[tuple[str, Quota | None]],
        size: Footprint,
    ) -> None:
        """Reserve for a claim before it is written; after `QuotaExceededError` nothing changed."""
        parties = tuple(who)
        for holder, quota in parties:
            self.check(holder, quota, size, (QuotaScope.ALL, QuotaScope.RUNNING))
        if lock not in self._entries:
            names = tuple(holder for holder, _ in parties)
            own = self.account
            self._enter(lock, _Entry(names, size, True, confirmed=False, account=own, runner=own))
            self._pending.add(lock)

    def paused_size(self, lock: str) -> Footprint | None:
        """Return the footprint that a resume would add; `None` if it runs or is not claimed."""
        entry = self._entries.get(lock)
        return None if entry is None or entry.running else entry.footprint

    def reserve_resume(self, lock: str, who: Iterable[tuple[str, Quota | None]]) -> None:
        """Count a paused sandbox as running; after `QuotaExceededError` nothing changed."""
        entry = self._entries.get(lock)
        if entry is None or entry.running:
            return
        for holder, quota in who:
            self.check(holder, quota, entry.footprint, (QuotaScope.RUNNING,))
        self._count(entry, -1)
        entry.running = entry.resuming = True
        entry.runner = self.account
        self._count(entry, +1)
        self._pending.add(lock)

    def cancel_resume(self, lock: str) -> None:
        """Undo `reserve_resume` if the write did not, or perhaps did not, happen.

        If it did happen, its event counts the sandbox again.
        """
        entry = self._entries.get(lock)
        if entry is not None and entry.resuming:
            self._count(entry, -1)
            entry.running = entry.resuming = False
            self._count(entry, +1)
            self._pending.discard(lock)

    def check(
        self, holder: str, quota: Quota | None, size: Footprint, scopes: tuple[QuotaScope, ...]
    ) -> None:
        """Raise `QuotaExceededError` if one more sandbox of this size exceeds a limit."""
        for limit in quota.limits if quota else ():
            if limit.scope not in scopes or limit.dimension not in OF_SANDBOXES:
                continue
            used = self.used(holder, limit.dimension, limit.scope)
            if size.of(limit.dimension) and used + size.of(limit.dimension) > limit.limit:
                raise exceeded(holder, limit, used=used, needed=size.of(limit.dimension))

    def held_by(self, account: str, key: UsageKey) -> int:
        """Return the usage of one account, reservations included."""
        return self._accounts.get(key, {}).get(account, 0)

    def accounts(self, key: UsageKey) -> Mapping[str, int]:
        """Return the usage by account, without sandboxes that were claimed without an account."""
        return self._accounts.get(key, {})

    def is_pending(self, holder: str) -> bool:
        """Whether a holder has reservations that are not known to be written."""
        return any(holder in self._entries[lock].holders for lock in self._pending)

    def release(self, lock: str) -> None:
        """Drop a reservation whose write is known not to have happened."""
        entry = self._entries.get(lock)
        if entry is not None and not entry.confirmed:
            self._remove(lock)

    def held(self, lock: str) -> Footprint | None:
        """Return what an object other than a claim holds, or `None`."""
        entry = self._entries.get(lock)
        return entry.footprint if entry is not None else None

    def hold(self, lock: str, who: Iterable[tuple[str, Quota | None]], size: Footprint) -> None:
        """Hold an amount, or what was held if that is more, before the object is written.

        After `QuotaExceededError` nothing changed. A smaller amount is never refused.
        """
        parties, before = tuple(who), self.held(lock) or Footprint(0, 0, 0)
        most = Footprint(
            max(size.cpu_millis, before.cpu_millis),
            max(size.memory_mib, before.memory_mib),
            max(size.count, before.count),
        )
        growth = Footprint(
            most.cpu_millis - before.cpu_millis,
            most.memory_mib - before.memory_mib,
            most.count - before.count,
        )
        for holder, quota in parties:
            self.check(holder, quota, growth, (QuotaScope.ALL, QuotaScope.RUNNING))
        self.set_held(lock, tuple(holder for holder, _ in parties), most)

    def set_held(self, lock: str, who: tuple[str, ...], size: Footprint | None) -> None:
        """Replace what an object holds, whatever the quotas are; `None`: it holds nothing."""
        self._remove(lock)
        if size is not None and size.count:
            own = self.account
            self._enter(lock, _Entry(who, size, True, confirmed=True, account=own, runner=own))

    def cover(self, batch_uid: str, *, is_covered: bool) -> None:
        """Whether a batch counts as a whole, so that its sandboxes do not count for themselves."""
        if not is_covered:
            self._covered.discard(batch_uid)
        elif batch_uid not in self._covered:
            self._covered.add(batch_uid)
            for lock in [lock for lock in self._entries if self._is_covered(lock)]:
                self._remove(lock)

    def _is_covered(self, lock: str) -> bool:
        # The lock of a shard is that of `terms.shard_terms`: batch, shard, sandbox.
        return bool(self._covered) and lock.rsplit("-", 2)[0] in self._covered

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Apply one event of the Sandbox informer."""
        before = old.spec.claim.lock if old is not None and old.spec.claim else None
        written = new.spec.claim if new is not None else None
        claim = counted_claim(new) if new is not None else None
        if before is not None and (claim is None or claim.lock != before):
            self._remove(before)
        if new is None or claim is None:
            if written is not None:
                # Claimed and deleted between two events: its reservation ends too.
                self._remove(written.lock)
            return
        if self._is_covered(claim.lock):
            return
        running = is_running_or_pausing(new)
        known = self._entries.get(claim.lock)
        size = known.footprint if known else footprint(resources_of(new))
        if known is not None and known.resuming and not running:
            # An event from before the resume was written: keep the reservation.
            return
        who = holders(claim.owner, claim.key_id)
        runner = claim.running_account or claim.account
        self._pending.discard(claim.lock)
        if (
            known is not None
            and known.running == running
            and known.holders == who
            and known.account == claim.account
            and (known.runner == runner or not running)
        ):
            # As it was reserved: the usual case, with nothing to recount.
            known.confirmed, known.resuming = True, False
            return
        self._remove(claim.lock)
        self._enter(
            claim.lock,
            _Entry(who, size, running, confirmed=True, account=claim.account, runner=runner),
        )

    def _enter(self, lock: str, entry: _Entry) -> None:
        self._entries[lock] = entry
        self._count(entry, +1)

    def _remove(self, lock: str) -> None:
        self._pending.discard(lock)
        entry = self._entries.pop(lock, None)
        if entry is not None:
            self._count(entry, -1)

    def _count(self, entry: _Entry, sign: int) -> None:
        size = entry.footprint
        amounts = (
            (Dimension.COUNT, sign * size.count),
            (Dimension.CPU, sign * size.cpu_millis),
            (Dimension.MEMORY, sign * size.memory_mib),
        )
        sums = self._sums
        for scope in (QuotaScope.ALL, QuotaScope.RUNNING) if entry.running else (QuotaScope.ALL,):
            account = entry.account if scope is QuotaScope.ALL else entry.runner
            for holder in entry.holders:
                for dimension, amount in amounts:
                    key = (holder, dimension, scope)
                    if total := sums.get(key, 0) + amount:
                        sums[key] = total
                    else:
                        sums.pop(key, None)
                    if account:
                        self._count_for(account, key, amount)

    def _count_for(self, account: str, key: UsageKey, amount: int) -> None:
        counted = self._accounts.setdefault(key, {})
        counted[account] = counted.get(account, 0) + amount
        if not counted[account]:
            del counted[account]
        if not counted:
            del self._accounts[key]


def exceeded(holder: str, limit: QuotaLimit, *, used: int, needed: int) -> QuotaExceededError:
    """Return the error that names the limit and the usage."""
    # Pausing helps only where paused sandboxes do not count.
    how = "kill or pause" if limit.scope is QuotaScope.RUNNING else "kill"
    return QuotaExceededError(
        f"{holder.replace(':', ' ')} has {used} of {limit.limit} "
        f"{limit.dimension} ({limit.scope}); this needs {needed}",
        hint=f"{how} sandboxes, or ask an operator to raise the quota",
    )
