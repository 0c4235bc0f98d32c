"""Keeps sandboxes that batches hold when their pool is deleted.

A batch owns sandboxes by its status, so they still have the pool as owner and would be garbage
collected with it. A pool that serves batches gets a finalizer. When it is deleted, the batches'
claims are written to their sandboxes, which removes the owner, and only then is the finalizer
removed.
"""

import logging

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.terms import claimed_for_shard
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.batch import Allocation, BatchSandbox
from paddock.resources.kinds.pool import FINALIZER_POOL, SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key, with_meta
from paddock.resources.tokens import TokenSeed

log = logging.getLogger(__name__)


class PoolFinalizer:
    """Holds a deleted pool back until batches' sandboxes are detached from it."""

    def __init__(
        self, provider: Provider, pool_members: PoolMembers, seed: TokenSeed, clock: Clock
    ) -> None:
        self._provider = provider
        self._pool_members = pool_members
        self._seed = seed
        self._clock = clock

    async def add(self, pool: SandboxPool, *, is_serving: bool) -> None:
        """Add the finalizer to a pool that serves batches, before it serves the first."""
        if FINALIZER_POOL in pool.metadata.finalizers:
            return
        held = self._pool_members.members(pool.key).allocated.values()
        if not is_serving and all(item.spec.claim is not None for item in held):
            return

        def change(newest: SandboxPool) -> SandboxPool | None:
            if newest.is_deleting or FINALIZER_POOL in newest.metadata.finalizers:
                return None
            return with_meta(newest, finalizers=(*newest.metadata.finalizers, FINALIZER_POOL))

        await self._provider.write.mutate(SandboxPool, pool.key, change, uid=pool.metadata.uid)

    async def release(self, pool: SandboxPool) -> int:
        """Detach what batches hold, then remove the finalizer; return the number detached."""
        if FINALIZER_POOL not in pool.metadata.finalizers:
            return 0
        held = tuple(self._pool_members.members(pool.key).allocated.values())
        detached = 0
        for sandbox in held:
            found = self._allocation(sandbox)
            if found is not None and sandbox.spec.claim is None:
                detached += await self._detach(sandbox.key, sandbox.metadata.uid, *found)

        def change(newest: SandboxPool) -> SandboxPool:
            left = tuple(name for name in newest.metadata.finalizers if name != FINALIZER_POOL)
            return with_meta(newest, finalizers=left)

        try:
            await self._provider.write.mutate(SandboxPool, pool.key, change, uid=pool.metadata.uid)
        except NotFoundError:
            log.debug("pool is already deleted")
        return detached

    def _allocation(self, sandbox: Sandbox) -> tuple[BatchSandbox, Allocation] | None:
        holder = self._pool_members.holder(sandbox.key)
        batch = self._provider.get(BatchSandbox, holder) if holder is not None else None
        if batch is None or batch.is_deleting:
            return None
        for item in batch.status.allocations:
            if item.uid == sandbox.metadata.uid:
                return batch, item
        return None

    async def _detach(self, key: Key, uid: str, batch: BatchSandbox, item: Allocation) -> int:
        def change(newest: Sandbox) -> Sandbox | None:
            if newest.spec.claim is not None or newest.is_deleting:
                return None
            return claimed_for_shard(newest, batch, item, self._seed, now=self._clock.now())

        try:
            await self._provider.write.mutate(Sandbox, key, change, uid=uid)
        except NotFoundError:
            return 0
        return 1
