"""Releases the sandbox of one shard: stops its tasks, then recycles or deletes it."""

from paddock.cache.pool_members import pool_of
from paddock.cache.provider import Provider
from paddock.controllers.batch import shards
from paddock.controllers.batch.shards import OVER
from paddock.controllers.batch.tasks.watcher import TaskWatcher
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.batch import Allocation, BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.transitions.recycling import Delete, Return, outcome


class ShardReleaser:
    """Releases sandboxes of shards."""

    def __init__(self, provider: Provider, task_watcher: TaskWatcher, clock: Clock) -> None:
        self._provider = provider
        self._task_watcher = task_watcher
        self._clock = clock

    async def release(self, batch: BatchSandbox, item: Allocation) -> None:
        """Release one shard's sandbox. Idempotent; a deleted sandbox is no error."""
        sandbox = self._provider.sandbox(shards.sandbox_key(batch, item))
        if sandbox is None or shards.loss(batch, item, sandbox):
            if sandbox is not None and sandbox.metadata.uid == item.uid:
                await self._delete_if_own(batch, sandbox)
            return
        if not batch.spec.pool_ref:
            await self._stop_tasks(batch, item, sandbox)
            await self.delete(sandbox)
            return
        pool = pool_of(sandbox)
        found = self._provider.get(SandboxPool, pool) if pool is not None else None
        decision = outcome(sandbox, found, now=self._clock.now())
        has_stopped = await self._stop_tasks(
            batch, item, sandbox, must_confirm=isinstance(decision, Return)
        )
        match decision:
            case Delete():
                await self.delete(sandbox)
            case Return(back):
                if not has_stopped and not back.spec.recycle:
                    # A task may still run in it: it must not be reused.
                    await self.delete(sandbox)
                elif back != sandbox:
                    await self._return(sandbox, found)

    async def _return(self, sandbox: Sandbox, pool: SandboxPool | None) -> None:
        """Return the newest version of the sandbox to its pool."""

        def change(newest: Sandbox) -> Sandbox:
            decision = outcome(newest, pool, now=self._clock.now())
            return decision.sandbox if isinstance(decision, Return) else newest

        try:
            uid = sandbox.metadata.uid
            await self._provider.write.mutate(Sandbox, sandbox.key, change, uid=uid)
        except NotFoundError:
            return

    async def _stop_tasks(
        self, batch: BatchSandbox, item: Allocation, sandbox: Sandbox, *, must_confirm: bool = False
    ) -> bool:
        template = batch.spec.task_template
        if template is None:
            return True
        if sandbox.status.phase is not Phase.RUNNING:
            # Not running (paused, for example): envd cannot stop tasks; they end with the sandbox.
            return False
        result = shards.results(batch).get(item.shard)
        if result is None and not must_confirm:
            return True
        if not must_confirm and result is not None and result.state in OVER:
            return True
        grace = float(template.spec.grace_seconds)
        return await self._task_watcher.stop(sandbox, item.sandbox_id, seconds=grace)

    async def _delete_if_own(self, batch: BatchSandbox, sandbox: Sandbox) -> None:
        claim = sandbox.spec.claim
        if claim is None or shards.is_claimed_by(batch, sandbox):
            await self.delete(sandbox)

    async def delete(self, sandbox: Sandbox) -> None:
        """Delete a sandbox. One that is gone or terminating is no error."""
        if sandbox.is_deleting:
            return
        try:
            await self._provider.write.delete(sandbox)
        except NotFoundError:
            return
