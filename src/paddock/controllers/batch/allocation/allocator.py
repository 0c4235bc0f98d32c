"""Allocates each pool's ready sandboxes to the batches that wait for them.

Event-driven, by pool: when its stock or one of its batches changes, `plan` decides, and one status
write per batch records all of its grants. The batch's status is the source of truth, also after a
restart. Sandboxes are taken out of stock before the write, so that nothing in this process claims
them meanwhile, and put back if the write fails.
"""

import logging
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from itertools import islice

from msgspec import structs

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims import warm
from paddock.claims.terms import batch_owner
from paddock.controllers.batch import shards
from paddock.controllers.batch.allocation.plan import AllocationPlan, BatchDemand, PoolStock, plan
from paddock.controllers.batch.allocation.pool_finalizer import PoolFinalizer
from paddock.controllers.batch.status import CONDITION_QUARANTINED, as_allocated
from paddock.engine.controller import Done, RequeueAfter, Result
from paddock.engine.recorder import Recorder
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError, NotFoundError
from paddock.kit.logs import fields
from paddock.resources.kinds.batch import FINALIZER_BATCH, BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key, is_true
from paddock.resources.transitions.recycling import is_overdue

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
"""Waiting batches are planned again, because their urgency grows with time."""
REASON_RESET_FAILED = "ResetFailed"
"""Reason of the event of a pool whose returned sandbox was not reset in time."""
RESET_LOOK_SECONDS = 1.0


Growth = Callable[[SandboxPool, datetime], int | None]
"""Returns how much a pool may still grow by autoscaling; `None` means unlimited."""
UNBOUNDED = 1 << 31


class Allocator:
    """Allocates sandboxes of pools to batches."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        clock: Clock,
        recorder: Recorder,
        growth: Growth,
        pool_finalizer: PoolFinalizer | None,
    ) -> None:
        """Without `pool_finalizer` (None), claims are always written at once."""
        self._provider = provider
        self._pool_members = pool_members
        self._clock = clock
        self._recorder = recorder
        self._unmet: dict[Key, int] = {}
        self._growth = growth
        self._pool_finalizer = pool_finalizer
        self._on_demand: list[Callable[[Key], None]] = []
        self._uncertain: list[tuple[Key, list[Sandbox]]] = []
        self._reported: set[Key] = set()
        """Unsatisfiable batches that were reported by an event."""
        self._demands: dict[Key, tuple[str, BatchDemand | None]] = {}
        """Demand of each batch by resource version: counting shards is costly."""

    def supply(self, pool: Key) -> int:
        """Return how many sandboxes a pool should create beyond its buffer for batches."""
        return self._unmet.get(pool, 0)

    def on_demand(self, listener: Callable[[Key], None]) -> None:
        """Call `listener` with a pool's key whenever the demand for it changes."""
        self._on_demand.append(listener)

    async def reconcile(self, key: Key) -> Result:
        """Allocate the stock of one pool."""
        pool = self._provider.get(SandboxPool, key)
        if pool is None or pool.is_deleting:
            self._set_unmet(key, 0)
            return await self._finalize(pool) if pool is not None else Done()
        await self._resolve_uncertain()
        await self._delete_overdue_resets(pool)
        decision = self._decide(pool)
        self._set_unmet(key, decision.unmet)
        self._report_unsatisfiable(pool, decision)
        if self._pool_finalizer is not None:
            await self._pool_finalizer.add(pool, is_serving=bool(decision.grants))
        served = 0
        for batch_key, count in decision.grants.items():
            served += await self._grant(pool, batch_key, count)
        if decision.unmet or self._pool_members.members(key).recycling:
            seconds = AGAIN_SECONDS if decision.unmet else RESET_LOOK_SECONDS
            return RequeueAfter(seconds, f"{served} allocated, {decision.unmet} unmet")
        return Done(f"{served} allocated" if served else "")

    async def _finalize(self, pool: SandboxPool) -> Result:
        if self._pool_finalizer is None:
            return Done()
        await self._resolve_uncertain()
        detached = await self._pool_finalizer.release(pool)
        return Done(f"{detached} detached for their batches" if detached else "")

    def waiting(self, pool: Key) -> tuple[BatchDemand, ...]:
        """Return the demand for a pool, by batch."""
        found = (self._demand_of(batch) for batch in self._provider.batches_of_pool(pool))
        return tuple(item for item in found if item is not None)

    def _demand_of(self, batch: BatchSandbox) -> BatchDemand | None:
        version = batch.metadata.resource_version
        known = self._demands.get(batch.key)
        if known is None or known[0] != version:
            known = (version, _waiting(batch))
            self._demands[batch.key] = known
        return known[1]

    def forget(self, batch: Key) -> None:
        """Forget a batch that is gone."""
        self._demands.pop(batch, None)
        self._reported.discard(batch)

    def _decide(self, pool: SandboxPool) -> AllocationPlan:
        members = self._pool_members.members(pool.key)
        held: Counter[str] = Counter()
        for batch in self._provider.batches_of_pool(pool.key):
            held[batch_owner(batch)] += batch.status.allocated
        capacity = pool.spec.capacity
        stock = PoolStock(
            ready=len(members.available),
            allocated=len(members.allocated),
            ceiling=capacity.pool_max if capacity is not None else UNBOUNDED,
            limit=UNBOUNDED if (max_size := self.max_size(pool)) is None else max_size,
            held_by_tenant=held,
        )
        return plan(
            self.waiting(pool.key), stock, algorithm=pool.spec.algorithm, now=self._clock.now()
        )

    def max_size(self, pool: SandboxPool) -> int | None:
        """Return the maximum size of a pool; `None` means unlimited."""
        if pool.spec.capacity is None:
            return None
        growth = self._growth(pool, self._clock.now())
        return None if growth is None else pool.spec.capacity.pool_max + growth

    def _report_unsatisfiable(self, pool: SandboxPool, decision: AllocationPlan) -> None:
        for key in decision.unsatisfiable - self._reported:
            if (batch := self._provider.get(BatchSandbox, key)) is not None:
                max_size = self.max_size(pool)
                text = f"it needs more at once than pool {pool.key.name} can ever have ({max_size})"
                self._recorder.warning(batch, "Unsatisfiable", text)
        self._reported |= decision.unsatisfiable

    def _set_unmet(self, pool: Key, unmet: int) -> None:
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
        missing = shards.missing_shards(batch)
        stock = warm.reserve(self._pool_members, self._provider, pool.key)
        taken = list(islice(stock, min(count, len(missing))))
        if not taken:
            return 0
        granted = [
            (shard, sandbox, ids.sandbox_id())
            for shard, sandbox in zip(missing, taken, strict=False)
        ]
        allocations = shards.granted(batch, granted)
        new = structs.replace(batch.status, allocations=allocations, pool=_pool_name(batch, pool))
        served = structs.replace(batch, status=new)
        wanted = as_allocated(served, self._provider, self._clock, max_size=self.max_size(pool))
        try:
            await self._provider.write.update_status(wanted)
        except (ConflictError, NotFoundError) as error:
            # Nothing was written; the event of the batch enqueues the pool again.
            log.debug(
                "batch changed before it was served", extra=fields(batch=key, error=error.message)
            )
            warm.unreserve(self._pool_members, taken)
            return 0
        except Exception:
            # It is unknown whether the write succeeded: they stay out of stock until it is known.
            self._uncertain.append((key, taken))
            raise
        self._recorder.normal(batch, "Allocated", f"{len(granted)} sandboxes of {pool.key.name}")
        return len(granted)

    async def _resolve_uncertain(self) -> None:
        """Read batches whose status write had no reply."""
        while self._uncertain:
            key, taken = self._uncertain[0]
            try:
                batch = await self._provider.live.get(BatchSandbox, key)
                # What it holds counts as allocated in this process from here on.
                self._provider.informer(BatchSandbox).observe(batch)
            except NotFoundError:
                log.debug("batch is gone", extra=fields(batch=key))
            self._uncertain.pop(0)
            warm.unreserve(self._pool_members, taken)

    # ---- recycling --------------------------------------------------------------------------

    async def _delete_overdue_resets(self, pool: SandboxPool) -> None:
        now = self._clock.now()
        for sandbox in tuple(self._pool_members.members(pool.key).recycling.values()):
            if not is_overdue(sandbox, now):
                continue
            try:
                # With the version: a reset that has ended meanwhile may have been claimed.
                version = sandbox.metadata.resource_version
                await self._provider.write.delete(sandbox, resource_version=version)
            except (ConflictError, NotFoundError):
                continue
            log.warning("reset took too long", extra=fields(sandbox=sandbox.key))
            seconds = pool.spec.recycle_strategy.timeout_seconds
            text = f"sandbox {sandbox.metadata.name} is deleted: not reset within {seconds} s"
            self._recorder.warning(pool, REASON_RESET_FAILED, text)


def _waiting(batch: BatchSandbox) -> BatchDemand | None:
    created = batch.metadata.creation_timestamp
    if FINALIZER_BATCH not in batch.metadata.finalizers or created is None:
        # Without the finalizer the batch could be deleted and its used sandboxes reused.
        return None
    if is_true(batch.status.conditions, CONDITION_QUARANTINED):
        return None
    missing = len(shards.missing_shards(batch))
    if not missing:
        return None
    held = sum(1 for item in batch.status.allocations if item.sandbox)
    floor = min(batch.spec.min_available or 0, batch.spec.replicas)
    return BatchDemand(
        key=batch.key,
        tenant=batch_owner(batch),
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
