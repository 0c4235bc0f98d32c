"""Reconciles batches: shards, pauses, tasks, status, and cleanup.

Pooled shards are assigned by `allocation/allocator`. This controller detects lost shards, releases
surplus ones, creates template shards, watches tasks, and cleans up before a batch is deleted. Every
step can be repeated after a crash: it reads what exists, not what it noted before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from msgspec import structs

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.terms import claimed_for_shard
from paddock.controllers.batch import shards, template_shards
from paddock.controllers.batch.allocation.pool_selector import PoolSelector
from paddock.controllers.batch.release import ShardReleaser
from paddock.controllers.batch.shard_backoff import ShardBackoff
from paddock.controllers.batch.status import (
    CONDITION_QUARANTINED,
    computed,
    found,
    with_condition,
)
from paddock.controllers.batch.tasks import plan
from paddock.controllers.batch.tasks.watcher import TaskWatcher, WatchedTask
from paddock.engine.controller import Done, RequeueAfter, Result
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from paddock.kit.logs import fields
from paddock.resources.kinds.batch import (
    FINALIZER_BATCH,
    Allocation,
    BatchSandbox,
    BatchSandboxStatus,
    TaskResult,
)
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.meta import Key, is_true, with_meta
from paddock.resources.tokens import TokenSeed

log = logging.getLogger(__name__)

CONCURRENCY = 64
WAIT_SECONDS = 0.5
FIRST_SECONDS = 1.0
"""A new batch is left to the allocator for this long; its write contains the whole status."""


class BatchController:
    """Reconciles batches."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        pool_selector: PoolSelector,
        task_watcher: TaskWatcher,
        seed: TokenSeed,
        clock: Clock,
        recorder: Recorder,
        is_sole_writer: bool,
        on_gone: Callable[[Key], None] = lambda _: None,
        max_size: Callable[[SandboxPool], int | None] = lambda _: None,
    ) -> None:
        """`is_sole_writer`: no other process claims sandboxes, so claims may be written late."""
        self._provider = provider
        self._pool_members = pool_members
        self._pool_selector = pool_selector
        self._task_watcher = task_watcher
        self._releaser = ShardReleaser(provider, task_watcher, clock)
        self._seed = seed
        self._clock = clock
        self._recorder = recorder
        self._is_sole_writer = is_sole_writer
        self._on_gone = on_gone
        self._max_size = max_size
        """Returns the maximum size of a pool; `None` means unlimited."""
        self._semaphore = asyncio.Semaphore(CONCURRENCY)
        self._shard_backoff = ShardBackoff()

    async def reconcile(self, key: Key) -> Result:
        """Perform all due steps for one batch."""
        batch = self._provider.get(BatchSandbox, key)
        if batch is None:
            self._task_watcher.forget(key)
            self._shard_backoff.forget(key)
            self._pool_selector.forget(key)
            self._on_gone(key)
            await self._collect_orphans(key)
            return Done()
        if batch.is_deleting:
            return await self._finalize(batch)
        now = self._clock.now()
        expiry = batch.spec.expire_time
        if expiry is not None and expiry <= now:
            await self._provider.write.delete(batch)
            return Done("expireTime has passed")
        if problem := _problem(batch):
            return await self._quarantine(batch, problem)
        if FINALIZER_BATCH not in batch.metadata.finalizers:
            finalizers = (*batch.metadata.finalizers, FINALIZER_BATCH)
            batch = await self._provider.write.update(with_meta(batch, finalizers=finalizers))
        waits = await self._advance(batch)
        left = (expiry - self._clock.now()).total_seconds() if expiry is not None else None
        pauses = [seconds for seconds in (waits, left) if seconds is not None]
        return RequeueAfter(max(min(pauses), 0.001)) if pauses else Done()

    async def _advance(self, batch: BatchSandbox) -> float | None:
        """Perform the due steps; return the seconds until the next reconcile, if any."""
        current = self._without_quarantine(batch)
        current, is_assigned = self._pool_selector.select(current)
        current = await self._pause_or_resume(current)
        current = await self._drop_lost(current)
        current = await self._scale_in(current)
        current, pause = await self._create_template_shards(current)
        current = await self._release_finished(current)
        if not self._is_sole_writer:
            await self._write_claims(current)
        self._watch_tasks(current)
        wanted = frozenset(shards.wanted_shards(current))
        results = plan.with_reports(current, self._task_watcher.reports(batch.key), wanted)
        current = _with_status(current, tasks=results)
        sandboxes = found(current, self._provider)
        if not batch.spec.pool_ref:
            ready = {shard for shard, item in sandboxes.items() if shards.is_ready(item)}
            current = _with_status(current, message=self._shard_backoff.message(batch, ready))
        pool = self._pool_selector.pool_of(current)
        max_size = self._max_size(pool) if pool is not None else None
        status = computed(current, sandboxes, self._clock, max_size=max_size)
        if self._awaits_first_allocation(batch, current):
            return FIRST_SECONDS
        if status != batch.status:
            await self._provider.write.update_status(structs.replace(batch, status=status))
            if shards.released_shards(structs.replace(batch, status=status)):
                return 0.001
        return pause if is_assigned else 5.0

    def _awaits_first_allocation(self, batch: BatchSandbox, current: BatchSandbox) -> bool:
        """Whether the allocator will soon write the first status of a new batch."""
        born = batch.metadata.creation_timestamp
        if batch.status.observed_generation or current.status.pool != batch.spec.pool_ref:
            return False
        if not batch.spec.pool_ref or born is None:
            return False
        return (self._clock.now() - born).total_seconds() < FIRST_SECONDS

    # ---- quarantine ----------------------------------------------------------------------

    async def _quarantine(self, batch: BatchSandbox, problem: str) -> Result:
        """Report a malformed batch in its status and leave it alone; others are not affected."""
        conditions = with_condition(
            batch, batch.status.conditions, CONDITION_QUARANTINED, holds=True, reason="Malformed",
            text=problem, clock=self._clock,
        )  # fmt: skip
        if conditions != batch.status.conditions:
            self._recorder.warning(batch, "Malformed", problem)
            status = structs.replace(
                batch.status,
                observed_generation=batch.metadata.generation,
                message=problem,
                conditions=conditions,
            )
            await self._provider.write.update_status(structs.replace(batch, status=status))
        expiry = batch.spec.expire_time
        if expiry is None:
            return Done(f"quarantined: {problem}")
        return RequeueAfter(
            (expiry - self._clock.now()).total_seconds(), "quarantined until expireTime"
        )

    def _without_quarantine(self, batch: BatchSandbox) -> BatchSandbox:
        if not is_true(batch.status.conditions, CONDITION_QUARANTINED):
            return batch
        conditions = with_condition(
            batch, batch.status.conditions, CONDITION_QUARANTINED, holds=False, reason="Sound",
            clock=self._clock,
        )  # fmt: skip
        return _with_status(batch, conditions=conditions, message="")

    # ---- pausing -------------------------------------------------------------------------

    async def _pause_or_resume(self, batch: BatchSandbox) -> BatchSandbox:
        generation = batch.metadata.generation
        paused = batch.spec.pause
        if paused is None or batch.status.pause_observed_generation == generation:
            return batch
        written = [
            partial(self._set_paused, sandbox, paused)
            for sandbox in found(batch, self._provider).values()
            if sandbox is not None and not sandbox.is_deleting and sandbox.spec.paused != paused
        ]
        await self._run_all(written)
        return _with_status(batch, pause_observed_generation=generation)

    async def _set_paused(self, sandbox: Sandbox, paused: bool) -> None:
        def change(newest: Sandbox) -> Sandbox:
            return structs.replace(newest, spec=structs.replace(newest.spec, paused=paused))

        try:
            uid = sandbox.metadata.uid
            await self._provider.write.mutate(Sandbox, sandbox.key, change, uid=uid)
        except NotFoundError:
            log.debug("shard was lost before it was paused")

    # ---- shards --------------------------------------------------------------------------

    async def _drop_lost(self, batch: BatchSandbox) -> BatchSandbox:
        """Empty lost shards; they keep their index and wait for another sandbox."""
        changes: dict[int, Allocation] = {}
        results: dict[int, TaskResult] = {}
        failed: list[Sandbox] = []
        for item in batch.status.allocations:
            if not item.sandbox:
                continue
            key = shards.sandbox_key(batch, item)
            sandbox = self._provider.sandbox(key)
            why = shards.loss(batch, item, sandbox)
            if not why and batch.spec.pool_ref and self._pool_members.holder(key) != batch.key:
                why = "its sandbox is held by another batch"
                sandbox = None
            if not why:
                continue
            changes[item.shard] = shards.emptied(item)
            if (result := plan.after_loss(batch, item.shard)) is not None:
                results[item.shard] = result
            if sandbox is not None and sandbox.status.phase in (Phase.FAILED, Phase.SUCCEEDED):
                failed.append(sandbox)
                if not batch.spec.pool_ref:
                    self._shard_backoff.record(batch, item.shard, why, self._clock.now())
            if item.shard not in shards.released_shards(batch):
                self._recorder.warning(batch, "ShardLost", f"shard {item.shard}: {why}")
        if not changes:
            return batch
        await self._run_all(partial(self._releaser.delete, sandbox) for sandbox in failed)
        allocations = shards.replaced(batch.status.allocations, changes)
        known = {item.shard: item for item in batch.status.tasks} | results
        return _with_status(
            batch,
            allocations=allocations,
            tasks=tuple(known[shard] for shard in sorted(known)),
        )

    async def _scale_in(self, batch: BatchSandbox) -> BatchSandbox:
        wanted = frozenset(shards.wanted_shards(batch, _unready(batch, self._provider)))
        surplus = [item for item in batch.status.allocations if item.shard not in wanted]
        if not surplus:
            return batch
        await self._release(batch, surplus)
        names = ", ".join(str(item.shard) for item in surplus)
        self._recorder.normal(batch, "ScaledIn", f"shards {names} were released")
        return _with_status(
            batch,
            allocations=shards.trimmed(batch, wanted),
            tasks=tuple(item for item in batch.status.tasks if item.shard in wanted),
        )

    async def _release_finished(self, batch: BatchSandbox) -> BatchSandbox:
        """Release the sandboxes of finished shards, if the policy is Release."""
        done = shards.released_shards(batch)
        over = [item for item in batch.status.allocations if item.shard in done and item.sandbox]
        if not over:
            return batch
        await self._release(batch, over)
        changes = {item.shard: shards.emptied(item) for item in over}
        released = (*batch.status.released, *(item.uid for item in over))
        return _with_status(
            batch,
            allocations=shards.replaced(batch.status.allocations, changes),
            released=released,
        )

    async def _release(self, batch: BatchSandbox, items: Iterable[Allocation]) -> None:
        await self._run_all(
            partial(self._releaser.release, batch, item) for item in items if item.sandbox
        )

    async def _create_template_shards(
        self, batch: BatchSandbox
    ) -> tuple[BatchSandbox, float | None]:
        """Create the sandboxes of a batch without a pool; return when to retry the rest."""
        if batch.spec.pool_ref:
            return batch, None
        now = self._clock.now()
        waits = {
            shard: self._shard_backoff.wait(batch, shard, now)
            for shard in shards.missing_shards(batch)
        }
        due = [shard for shard, seconds in waits.items() if not seconds]
        made: dict[int, Sandbox] = {}
        await self._run_all(partial(self._make, batch, shard, made) for shard in due)
        pauses = [seconds for seconds in waits.values() if seconds]
        if len(made) < len(due):
            pauses.append(WAIT_SECONDS)
        return template_shards.adopted(batch, made), min(pauses, default=None)

    async def _make(self, batch: BatchSandbox, shard: int, made: dict[int, Sandbox]) -> None:
        wanted = template_shards.child(batch, shard, self._seed, now=self._clock.now())
        try:
            made[shard] = await self._provider.write.create(wanted)
        except AlreadyExistsError:
            # Created before a crash, or still terminating.
            known = await self._provider.live.get(Sandbox, wanted.key)
            if known.is_deleting or known.status.phase is Phase.FAILED:
                await self._releaser.delete(known)
            elif any(ref.uid == batch.metadata.uid for ref in known.metadata.owner_references):
                made[shard] = known
            else:
                self._recorder.warning(
                    batch, "NameTaken", f"sandbox {wanted.key} exists and belongs to another owner"
                )

    async def _write_claims(self, batch: BatchSandbox) -> None:
        """Write claims at once: other processes could claim these sandboxes otherwise."""
        bare = [
            (item, sandbox)
            for item in batch.status.allocations
            if item.sandbox
            and (sandbox := self._provider.sandbox(shards.sandbox_key(batch, item))) is not None
            and sandbox.spec.claim is None
        ]
        await self._run_all(
            partial(self._write_claim, batch, item, sandbox) for item, sandbox in bare
        )

    async def _write_claim(self, batch: BatchSandbox, item: Allocation, sandbox: Sandbox) -> None:
        try:
            await self._provider.write.update(
                claimed_for_shard(sandbox, batch, item, self._seed, now=self._clock.now())
            )
        except (ConflictError, NotFoundError):
            # It was claimed or changed first: the next reconcile sees the result.
            log.debug("claim of a shard was not written yet")

    # ---- tasks ---------------------------------------------------------------------------

    def _watch_tasks(self, batch: BatchSandbox) -> None:
        if batch.spec.task_template is None:
            return
        tasks: dict[int, WatchedTask] = {}
        for item in batch.status.allocations:
            if not item.sandbox or batch.spec.pause:
                continue
            sandbox = self._provider.sandbox(shards.sandbox_key(batch, item))
            if sandbox is None or not shards.is_ready(sandbox):
                continue
            if not self._is_sole_writer and sandbox.spec.claim is None:
                continue
            order = plan.order_for(batch, item.shard)
            if order is not None:
                tasks[item.shard] = WatchedTask(
                    sandbox=sandbox, sandbox_id=item.sandbox_id, order=order
                )
        self._task_watcher.watch(batch.key, tasks)

    # ---- deletion -------------------------------------------------------------------------

    async def _finalize(self, batch: BatchSandbox) -> Result:
        """Stop tasks, release all sandboxes, then remove the finalizer."""
        self._task_watcher.forget(batch.key)
        held = [item for item in batch.status.allocations if item.sandbox]
        if held:
            await self._release(batch, held)
            status = structs.replace(batch.status, allocations=(), allocated=0, ready=0)
            batch = await self._provider.write.update_status(structs.replace(batch, status=status))
        if FINALIZER_BATCH in batch.metadata.finalizers:
            left = tuple(name for name in batch.metadata.finalizers if name != FINALIZER_BATCH)
            await self._provider.write.update(with_meta(batch, finalizers=left))
        return Done(f"{len(held)} sandboxes released")

    async def _collect_orphans(self, key: Key) -> None:
        """Clean up after a batch that was deleted without its finalizer."""
        for name, uid in self._pool_members.orphans(key).items():
            sandbox = self._provider.sandbox(name)
            if sandbox is not None and sandbox.metadata.uid == uid:
                await self._releaser.delete(sandbox)
                log.warning(
                    "orphan of a deleted batch removed", extra=fields(sandbox=name, batch=key)
                )
            self._pool_members.clear_orphan(key, name)
        for sandbox in self._provider.sandboxes_of_batch(key):
            await self._releaser.delete(sandbox)

    async def _run_all(self, work: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Run many steps with bounded concurrency; raise the first error."""

        async def one(step: Callable[[], Awaitable[None]]) -> None:
            async with self._semaphore:
                await step()

        try:
            async with asyncio.TaskGroup() as group:
                for step in work:
                    group.create_task(one(step))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors


def _with_status(batch: BatchSandbox, **changes: object) -> BatchSandbox:
    status: BatchSandboxStatus = structs.replace(batch.status, **changes)
    return structs.replace(batch, status=status)


def _problem(batch: BatchSandbox) -> str:
    """Return why a batch is malformed; empty if it is valid."""
    try:
        template_shards.check(batch)
        plan.check(batch)
    except InvalidError as error:
        return error.advice
    indexes = [item.shard for item in batch.status.allocations]
    if len(set(indexes)) != len(indexes) or any(index < 0 for index in indexes):
        return "status.allocations names a shard twice"
    named = [(item.namespace, item.sandbox) for item in batch.status.allocations if item.sandbox]
    if len(set(named)) != len(named):
        return "status.allocations names a sandbox twice"
    return ""


def _unready(batch: BatchSandbox, provider: Provider) -> frozenset[int]:
    sandboxes = found(batch, provider)
    return frozenset(shard for shard, item in sandboxes.items() if not shards.is_ready(item))
