"""Keeps each batch as its spec asks: shards, pauses, tasks, status, and its end.

Pooled shards are given by `allocator`; here lost ones are noticed, surplus ones given back, direct
ones made, tasks followed, and everything cleaned up before the batch goes. Every step may be
performed again after a crash: what was given back is known by what is, not by what was noted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from msgspec import structs

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.batch import shards, template_shards
from paddock.controllers.batch.allocation.pool_selector import Assignment
from paddock.controllers.batch.release import GivingBack
from paddock.controllers.batch.shard_backoff import Setbacks
from paddock.controllers.batch.status import (
    CONDITION_QUARANTINED,
    computed,
    found,
    with_condition,
)
from paddock.controllers.batch.tasks import plan
from paddock.controllers.batch.tasks.watcher import Follower, Job
from paddock.engine.controller import After, Done, Result
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
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
from paddock.resources.transitions.batch_claim import stamped

log = logging.getLogger(__name__)

AT_ONCE = 64
WAIT_SECONDS = 0.5
FIRST_SECONDS = 1.0
"""So long a new batch is left to the allocator, whose write tells everything at once."""


class BatchController:
    """Looks after batches."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        assignment: Assignment,
        follower: Follower,
        seed: TokenSeed,
        clock: Clock,
        recorder: Recorder,
        is_alone: bool,
        on_gone: Callable[[Key], None] = lambda _: None,
        most: Callable[[SandboxPool], int | None] = lambda _: None,
    ) -> None:
        """`is_alone`: no other process claims sandboxes, so claims need not be written at once."""
        self._provider = provider
        self._pool_members = pool_members
        self._assignment = assignment
        self._follower = follower
        self._giving_back = GivingBack(provider, follower, clock)
        self._seed = seed
        self._clock = clock
        self._recorder = recorder
        self._is_alone = is_alone
        self._on_gone = on_gone
        self._most = most
        """How many sandboxes a pool may ever have; `None` where nothing bounds it."""
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._setbacks = Setbacks()

    async def reconcile(self, key: Key) -> Result:
        """Bring one batch a step nearer to what is wanted."""
        batch = self._provider.get(BatchSandbox, key)
        if batch is None:
            self._follower.forget(key)
            self._setbacks.forget(key)
            self._on_gone(key)
            await self._collect_orphans(key)
            return Done()
        if batch.is_deleting:
            return await self._end(batch)
        now = self._clock.now()
        expiry = batch.spec.expire_time
        if expiry is not None and expiry <= now:
            await self._provider.write.delete(batch)
            return Done("its time is over")
        if problem := _problem(batch):
            return await self._quarantine(batch, problem)
        if FINALIZER_BATCH not in batch.metadata.finalizers:
            finalizers = (*batch.metadata.finalizers, FINALIZER_BATCH)
            batch = await self._provider.write.update(with_meta(batch, finalizers=finalizers))
        waits = await self._advance(batch)
        left = (expiry - self._clock.now()).total_seconds() if expiry is not None else None
        pauses = [seconds for seconds in (waits, left) if seconds is not None]
        return After(max(min(pauses), 0.001)) if pauses else Done()

    async def _advance(self, batch: BatchSandbox) -> float | None:
        """Do what is due; gives the seconds after which to look again, if any."""
        current = self._cured(batch)
        current, is_assigned = self._assignment.assigned(current)
        current = await self._pause_or_resume(current)
        current = await self._drop_lost(current)
        current = await self._scale_in(current)
        current, pause = await self._make_direct(current)
        current = await self._release_finished(current)
        if not self._is_alone:
            await self._stamp(current)
        self._follow(current)
        wanted = frozenset(shards.wanted_shards(current))
        results = plan.with_reports(current, self._follower.reports(batch.key), wanted)
        current = _with_status(current, tasks=results)
        sandboxes = found(current, self._provider)
        if not batch.spec.pool_ref:
            ready = {shard for shard, item in sandboxes.items() if shards.is_ready(item)}
            current = _with_status(current, message=self._setbacks.told(batch, ready))
        pool = self._assignment.pool_of(current)
        most = self._most(pool) if pool is not None else None
        status = computed(current, sandboxes, self._clock, most=most)
        if self._is_about_to_be_served(batch, current):
            return FIRST_SECONDS
        if status != batch.status:
            await self._provider.write.update_status(structs.replace(batch, status=status))
            if shards.released_shards(structs.replace(batch, status=status)):
                return 0.001
        return pause if is_assigned else 5.0

    def _is_about_to_be_served(self, batch: BatchSandbox, current: BatchSandbox) -> bool:
        """Say whether the allocator will soon write all there is to say of a new batch."""
        born = batch.metadata.creation_timestamp
        if batch.status.observed_generation or current.status.pool != batch.spec.pool_ref:
            return False
        if not batch.spec.pool_ref or born is None:
            return False
        return (self._clock.now() - born).total_seconds() < FIRST_SECONDS

    # ---- quarantine ----------------------------------------------------------------------

    async def _quarantine(self, batch: BatchSandbox, problem: str) -> Result:
        """Leave a batch that makes no sense alone, and say so; all others go on."""
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
            return Done(f"left alone: {problem}")
        return After((expiry - self._clock.now()).total_seconds(), "left alone until its end")

    def _cured(self, batch: BatchSandbox) -> BatchSandbox:
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
        wish = batch.spec.pause
        if wish is None or batch.status.pause_observed_generation == generation:
            return batch
        written = [
            partial(self._set_paused, sandbox, wish)
            for sandbox in found(batch, self._provider).values()
            if sandbox is not None and not sandbox.is_deleting and sandbox.spec.paused != wish
        ]
        await self._all(written)
        return _with_status(batch, pause_observed_generation=generation)

    async def _set_paused(self, sandbox: Sandbox, wish: bool) -> None:
        def change(newest: Sandbox) -> Sandbox:
            return structs.replace(newest, spec=structs.replace(newest.spec, paused=wish))

        try:
            uid = sandbox.metadata.uid
            await self._provider.write.mutate(Sandbox, sandbox.key, change, uid=uid)
        except NotFoundError:
            log.debug("a shard was lost before it was paused")

    # ---- shards --------------------------------------------------------------------------

    async def _drop_lost(self, batch: BatchSandbox) -> BatchSandbox:
        """Let go of shards that are lost; they keep their index and wait for another sandbox."""
        changes: dict[int, Allocation] = {}
        results: dict[int, TaskResult] = {}
        doomed: list[Sandbox] = []
        for item in batch.status.allocations:
            if not item.sandbox:
                continue
            key = shards.sandbox_key(batch, item)
            sandbox = self._provider.sandbox(key)
            why = shards.loss(batch, item, sandbox)
            if not why and batch.spec.pool_ref and self._pool_members.holder(key) != batch.key:
                why = "another batch has its sandbox"
                sandbox = None
            if not why:
                continue
            changes[item.shard] = shards.emptied(item)
            if (result := plan.after_loss(batch, item.shard)) is not None:
                results[item.shard] = result
            if sandbox is not None and sandbox.status.phase in (Phase.FAILED, Phase.SUCCEEDED):
                doomed.append(sandbox)
                if not batch.spec.pool_ref:
                    self._setbacks.note(batch, item.shard, why, self._clock.now())
            if item.shard not in shards.released_shards(batch):
                self._recorder.warning(batch, "ShardLost", f"shard {item.shard}: {why}")
        if not changes:
            return batch
        await self._all(partial(self._giving_back.delete, sandbox) for sandbox in doomed)
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
        await self._give_back(batch, surplus)
        names = ", ".join(str(item.shard) for item in surplus)
        self._recorder.normal(batch, "ScaledIn", f"shards {names} were given up")
        return _with_status(
            batch,
            allocations=shards.trimmed(batch, wanted),
            tasks=tuple(item for item in batch.status.tasks if item.shard in wanted),
        )

    async def _release_finished(self, batch: BatchSandbox) -> BatchSandbox:
        """Give back the sandboxes of shards whose work is done, where that is wished."""
        done = shards.released_shards(batch)
        over = [item for item in batch.status.allocations if item.shard in done and item.sandbox]
        if not over:
            return batch
        await self._give_back(batch, over)
        changes = {item.shard: shards.emptied(item) for item in over}
        released = (*batch.status.released, *(item.uid for item in over))
        return _with_status(
            batch,
            allocations=shards.replaced(batch.status.allocations, changes),
            released=released,
        )

    async def _give_back(self, batch: BatchSandbox, items: Iterable[Allocation]) -> None:
        await self._all(
            partial(self._giving_back.one, batch, item) for item in items if item.sandbox
        )

    async def _make_direct(self, batch: BatchSandbox) -> tuple[BatchSandbox, float | None]:
        """Make the sandboxes of a batch without a pool; says when to look at the rest."""
        if batch.spec.pool_ref:
            return batch, None
        now = self._clock.now()
        waits = {
            shard: self._setbacks.wait(batch, shard, now) for shard in shards.missing_shards(batch)
        }
        due = [shard for shard, seconds in waits.items() if not seconds]
        made: dict[int, Sandbox] = {}
        await self._all(partial(self._make, batch, shard, made) for shard in due)
        pauses = [seconds for seconds in waits.values() if seconds]
        if len(made) < len(due):
            pauses.append(WAIT_SECONDS)
        return template_shards.adopted(batch, made), min(pauses, default=None)

    async def _make(self, batch: BatchSandbox, shard: int, made: dict[int, Sandbox]) -> None:
        wanted = template_shards.child(batch, shard, self._seed, now=self._clock.now())
        try:
            made[shard] = await self._provider.write.create(wanted)
        except AlreadyExistsError:
            # Ours from before a crash, or one that is still on its way out.
            known = await self._provider.live.get(Sandbox, wanted.key)
            if known.is_deleting or known.status.phase is Phase.FAILED:
                await self._giving_back.delete(known)
            elif any(ref.uid == batch.metadata.uid for ref in known.metadata.owner_references):
                made[shard] = known
            else:
                self._recorder.warning(batch, "NameTaken", f"a sandbox {wanted.key} exists")

    async def _stamp(self, batch: BatchSandbox) -> None:
        """Write claims now: other processes might claim these sandboxes otherwise."""
        bare = [
            (item, sandbox)
            for item in batch.status.allocations
            if item.sandbox
            and (sandbox := self._provider.sandbox(shards.sandbox_key(batch, item))) is not None
            and sandbox.spec.claim is None
        ]
        await self._all(partial(self._stamp_one, batch, item, sandbox) for item, sandbox in bare)

    async def _stamp_one(self, batch: BatchSandbox, item: Allocation, sandbox: Sandbox) -> None:
        try:
            await self._provider.write.update(
                stamped(sandbox, batch, item, self._seed, now=self._clock.now())
            )
        except (ConflictError, NotFoundError):
            # Somebody was first, or it changed: the next look tells.
            log.debug("shard was not stamped yet")

    # ---- tasks ---------------------------------------------------------------------------

    def _follow(self, batch: BatchSandbox) -> None:
        if batch.spec.task_template is None:
            return
        jobs: dict[int, Job] = {}
        for item in batch.status.allocations:
            if not item.sandbox or batch.spec.pause:
                continue
            sandbox = self._provider.sandbox(shards.sandbox_key(batch, item))
            if sandbox is None or not shards.is_ready(sandbox):
                continue
            if not self._is_alone and sandbox.spec.claim is None:
                continue
            order = plan.order_for(batch, item.shard)
            if order is not None:
                jobs[item.shard] = Job(sandbox=sandbox, sandbox_id=item.sandbox_id, order=order)
        self._follower.ensure(batch.key, jobs)

    # ---- the end -------------------------------------------------------------------------

    async def _end(self, batch: BatchSandbox) -> Result:
        """Stop tasks, give every sandbox back, then let the batch go."""
        self._follower.forget(batch.key)
        held = [item for item in batch.status.allocations if item.sandbox]
        if held:
            await self._give_back(batch, held)
            status = structs.replace(batch.status, allocations=(), allocated=0, ready=0)
            batch = await self._provider.write.update_status(structs.replace(batch, status=status))
        if FINALIZER_BATCH in batch.metadata.finalizers:
            left = tuple(name for name in batch.metadata.finalizers if name != FINALIZER_BATCH)
            await self._provider.write.update(with_meta(batch, finalizers=left))
        return Done(f"{len(held)} sandboxes were given back")

    async def _collect_orphans(self, key: Key) -> None:
        """Clean up after a batch whose finalizer somebody took off."""
        for name, uid in self._pool_members.orphans(key).items():
            sandbox = self._provider.sandbox(name)
            if sandbox is not None and sandbox.metadata.uid == uid:
                await self._giving_back.delete(sandbox)
                log.warning("orphan of a vanished batch deleted: %s", name)
            self._pool_members.clear_orphan(key, name)
        for sandbox in self._provider.sandboxes_of_batch(key):
            await self._giving_back.delete(sandbox)

    async def _all(self, work: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Do many things, a good number at once; the first failure is raised."""

        async def one(step: Callable[[], Awaitable[None]]) -> None:
            async with self._gate:
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
    """Say why a batch makes no sense; empty where it does."""
    try:
        template_shards.check(batch)
        plan.check(batch)
    except InvalidError as error:
        return error.message
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
