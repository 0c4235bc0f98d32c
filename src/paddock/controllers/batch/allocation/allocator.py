"""Gives each pool's ready sandboxes to the batches that wait for them.

Event-driven, by pool: whenever its stock or one of its batches changes, `allocation` decides and
one status write per served batch records all of its grants. The batch's status is the truth: it
is what `PoolMembers` reads, now and after a restart. Sandboxes are reserved there before
the write, so nobody in this process can claim them meanwhile, and put back if it fails.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime

from msgspec import structs

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.batch import shards
from paddock.controllers.batch.allocation.plan import Allotment, Stock, Waiting, allot
from paddock.controllers.batch.allocation.pool_finalizer import Parting
from paddock.controllers.batch.status import CONDITION_QUARANTINED, as_allocated
from paddock.engine.controller import After, Done, Result
from paddock.engine.recorder import Recorder
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError, NotFoundError
from paddock.kit.logs import fields
from paddock.resources.kinds.batch import FINALIZER_BATCH, BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key, is_true
from paddock.resources.transitions.batch_claim import owner_of
from paddock.resources.transitions.recycling import is_overdue

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
"""Those who wait are looked at again, because waiting makes them more urgent."""
RESET_LOOK_SECONDS = 1.0


Growth = Callable[[SandboxPool, datetime], int | None]
"""How much larger a pool may be made by whoever sizes it; `None` is without bound."""
UNBOUNDED = 1 << 31


class Allocator:
    """Serves batches from pools."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        clock: Clock,
        recorder: Recorder,
        growth: Growth,
        parting: Parting | None,
    ) -> None:
        """Serve from `pool_members`; `parting` is needless where claims are always written."""
        self._provider = provider
        self._pool_members = pool_members
        self._clock = clock
        self._recorder = recorder
        self._unmet: dict[Key, int] = {}
        self._growth = growth
        self._parting = parting
        self._on_demand: list[Callable[[Key], None]] = []
        self._doubts: list[tuple[Key, list[Sandbox]]] = []
        self._told: set[Key] = set()
        """Batches that were told that they can never be served."""
        self._seen: dict[Key, tuple[str, Waiting | None]] = {}
        """What each batch waits for, as of which version: counting shards costs a moment."""

    def supply(self, pool: Key) -> int:
        """Say how many sandboxes a pool should make beyond its buffer, for batches that wait."""
        return self._unmet.get(pool, 0)

    def on_demand(self, listener: Callable[[Key], None]) -> None:
        """Call with a pool's key whenever what is asked of it changes."""
        self._on_demand.append(listener)

    async def reconcile(self, key: Key) -> Result:
        """Give out what one pool has."""
        pool = self._provider.get(SandboxPool, key)
        if pool is None or pool.is_deleting:
            self._ask(key, 0)
            return await self._part(pool) if pool is not None else Done()
        await self._resolve_doubts()
        await self._end_overdue_resets(key)
        decision = self._decide(pool)
        self._ask(key, decision.unmet)
        self._tell_hopeless(pool, decision)
        if self._parting is not None:
            await self._parting.hold(pool, is_giving=bool(decision.grants))
        served = 0
        for batch_key, count in decision.grants.items():
            served += await self._grant(pool, batch_key, count)
        if decision.unmet or any(item.spec.recycle for item in self._resets(key)):
            seconds = AGAIN_SECONDS if decision.unmet else RESET_LOOK_SECONDS
            return After(seconds, f"{served} given out, {decision.unmet} are waited for")
        return Done(f"{served} given out" if served else "")

    async def _part(self, pool: SandboxPool) -> Result:
        if self._parting is None:
            return Done()
        await self._resolve_doubts()
        untied = await self._parting.let_go(pool)
        return Done(f"{untied} stay with their batches" if untied else "")

    def waiting(self, pool: Key) -> tuple[Waiting, ...]:
        """Give the batches that want sandboxes of a pool."""
        found = (self._wish(batch) for batch in self._provider.batches_of_pool(pool))
        return tuple(item for item in found if item is not None)

    def _wish(self, batch: BatchSandbox) -> Waiting | None:
        version = batch.metadata.resource_version
        known = self._seen.get(batch.key)
        if known is None or known[0] != version:
            known = (version, _waiting(batch))
            self._seen[batch.key] = known
        return known[1]

    def forget(self, batch: Key) -> None:
        """Drop what is remembered of a batch that is gone."""
        self._seen.pop(batch, None)
        self._told.discard(batch)

    def _decide(self, pool: SandboxPool) -> Allotment:
        members = self._pool_members.members(pool.key)
        held: Counter[str] = Counter()
        for batch in self._provider.batches_of_pool(pool.key):
            held[owner_of(batch)] += batch.status.allocated
        capacity = pool.spec.capacity
        stock = Stock(
            ready=len(members.available),
            allocated=len(members.allocated),
            ceiling=capacity.pool_max if capacity is not None else UNBOUNDED,
            limit=UNBOUNDED if (most := self.most(pool)) is None else most,
            held_by_tenant=held,
        )
        return allot(
            self.waiting(pool.key), stock, algorithm=pool.spec.algorithm, now=self._clock.now()
        )

    def most(self, pool: SandboxPool) -> int | None:
        """Say how many sandboxes a pool may ever have; `None` where nothing bounds it."""
        if pool.spec.capacity is None:
            return None
        growth = self._growth(pool, self._clock.now())
        return None if growth is None else pool.spec.capacity.pool_max + growth

    def _tell_hopeless(self, pool: SandboxPool, decision: Allotment) -> None:
        for key in decision.hopeless - self._told:
            if (batch := self._provider.get(BatchSandbox, key)) is not None:
                most = self.most(pool)
                text = f"it wants more at once than pool {pool.key.name} may ever have ({most})"
                self._recorder.warning(batch, "Unsatisfiable", text)
        self._told |= decision.hopeless

    def _ask(self, pool: Key, unmet: int) -> None:
        if self._unmet.get(pool, 0) == unmet:
            return
        if unmet:
            self._unmet[pool] = unmet
        else:
            self._unmet.pop(pool, None)
        for listener in self._on_demand:
            listener(pool)

    async def _grant(self, pool: SandboxPool, key: Key, count: int) -> int:
        batch = self._provider.get(BatchSandbox, key)
        if batch is None:
            return 0
        taken = self._take(pool, min(count, len(shards.missing_shards(batch))))
        if not taken:
            return 0
        missing = shards.missing_shards(batch)
        granted = [
            (shard, sandbox, ids.sandbox_id())
            for shard, sandbox in zip(missing, taken, strict=False)
        ]
        allocations = shards.granted(batch, granted)
        new = structs.replace(batch.status, allocations=allocations, pool=_pool_name(batch, pool))
        served = structs.replace(batch, status=new)
        wanted = as_allocated(served, self._provider, self._clock, most=self.most(pool))
        try:
            await self._provider.write.update_status(wanted)
        except (ConflictError, NotFoundError) as error:
            # Nothing was written; the batch's event brings the pool back here.
            log.debug("batch changed meanwhile", extra=fields(batch=key, error=error.message))
            self._give_back(taken)
            return 0
        except Exception:
            # Nobody knows whether it was written: they stay out of stock until somebody does.
            self._doubts.append((key, taken))
            raise
        self._recorder.normal(batch, "Allocated", f"{len(granted)} sandboxes of {pool.key.name}")
        return len(granted)

    def _take(self, pool: SandboxPool, count: int) -> list[Sandbox]:
        taken: list[Sandbox] = []
        while len(taken) < count:
            sandbox = self._pool_members.reserve(pool.key, pool.status.revision or None)
            if sandbox is None:
                break
            taken.append(sandbox)
        return taken

    def _give_back(self, taken: Iterable[Sandbox]) -> None:
        for sandbox in taken:
            self._pool_members.unreserve(sandbox.key)

    async def _resolve_doubts(self) -> None:
        """Find out what became of writes whose replies were lost."""
        while self._doubts:
            key, taken = self._doubts[0]
            try:
                batch = await self._provider.live.get(BatchSandbox, key)
                # What it holds is allocated from here on, for everybody in this process.
                self._provider.informer(BatchSandbox).observe(batch)
            except NotFoundError:
                log.debug("batch is gone", extra=fields(batch=key))
            self._doubts.pop(0)
            self._give_back(taken)

    # ---- resets --------------------------------------------------------------------------

    def _resets(self, pool: Key) -> list[Sandbox]:
        return [
            item for item in self._pool_members.members(pool).creating.values() if item.spec.recycle
        ]

    async def _end_overdue_resets(self, pool: Key) -> None:
        now = self._clock.now()
        for sandbox in self._resets(pool):
            if is_overdue(sandbox, now):
                log.warning("reset took too long", extra=fields(sandbox=sandbox.key))
                try:
                    await self._provider.write.delete(sandbox)
                except NotFoundError:
                    continue


def _waiting(batch: BatchSandbox) -> Waiting | None:
    created = batch.metadata.creation_timestamp
    if FINALIZER_BATCH not in batch.metadata.finalizers or created is None:
        # Without it the batch could vanish and leave what it used to the next one.
        return None
    if is_true(batch.status.conditions, CONDITION_QUARANTINED):
        return None
    missing = len(shards.missing_shards(batch))
    if not missing:
        return None
    held = sum(1 for item in batch.status.allocations if item.sandbox)
    floor = min(batch.spec.min_available or 0, batch.spec.replicas)
    return Waiting(
        key=batch.key,
        tenant=owner_of(batch),
        since=created,
        missing=missing,
        held=held,
        priority=batch.spec.priority,
        at_once=min(max(floor - held, 0), missing),
    )


def _pool_name(batch: BatchSandbox, pool: SandboxPool) -> str:
    if pool.metadata.namespace == batch.metadata.namespace:
        return pool.metadata.name
    return str(pool.key)
