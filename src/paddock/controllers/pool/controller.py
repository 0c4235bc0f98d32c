"""Performs the plan of one pool.

Members are created with the pool as their controller, and deleted with the resource version that
was read. A member that was claimed in the meantime has another version and stays, so a scale-down
never deletes a sandbox that is being claimed.
"""

import asyncio
import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import islice

from msgspec import structs

from paddock.cache.pool_members import Members, PoolMembers, PoolState, revision_of
from paddock.cache.writes import Writer
from paddock.controllers.pool import start_backoff, strategies
from paddock.controllers.pool.factory import child, revision
from paddock.controllers.pool.plan import Counts, PoolPlan, band, plan
from paddock.controllers.pool.status import computed, degraded, image_problem
from paddock.controllers.sandbox.templates import find, resolve
from paddock.engine.controller import Done, RequeueAfter, Result
from paddock.engine.informer import Informer
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError, NotFoundError
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolStatus
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key
from paddock.resources.transitions.image_pin import pinned

GATHER_SECONDS = 0.05
"""Changes of a pool's members within this time lead to one reconcile."""
RELAXED_GATHER_SECONDS = 0.5
"""The same for a pool that defers to claims, while it is at least half full."""
Supply = Callable[[Key], int]
"""Returns how many sandboxes batches and waiting claims need beyond the buffer."""


def no_supply(_pool: Key) -> int:
    """Return 0: nothing is needed beyond the buffer."""
    return 0


class PoolController:
    """Keeps each pool at the size of its spec."""

    def __init__(
        self,
        *,
        pools: Informer[SandboxPool],
        templates: Informer[SandboxTemplate],
        pool_members: PoolMembers,
        write: Writer,
        clock: Clock,
        recorder: Recorder,
        supply: Supply = no_supply,
    ) -> None:
        self._pools = pools
        self._templates = templates
        self._pool_members = pool_members
        self._write = write
        self._clock = clock
        self._recorder = recorder
        self._supply = supply
        self._claims_seen: dict[Key, tuple[int, float]] = {}
        """Number of claims of each pool, and the time when that last changed."""
        self._relaxed_above: dict[Key, int] = {}
        """For pools that defer to claims: above this stock a reconcile is not urgent."""

    async def reconcile(self, key: Key) -> Result:
        """Perform the plan of one pool."""
        pool = self._pools.get(key)
        if pool is None or pool.is_deleting:
            self._claims_seen.pop(key, None)
            self._relaxed_above.pop(key, None)
            return Done()
        try:
            template = self._template(pool)
        except NotFoundError as error:
            await self._degraded(pool, "TemplateNotFound", error.message)
            return Done(error.message)
        try:
            strategies.eviction_handler(pool)
            followed = strategies.update_strategy(pool).applied(pool.spec)
        except NotFoundError as error:
            await self._degraded(pool, "UnknownStrategy", error.message)
            return Done(error.message)
        current = revision(template)
        members = self._pool_members.members(key)
        status = await self._reap(pool, members, current)
        tried = structs.replace(pool, status=status)
        counts = self._count(pool, members, current)
        decision = plan(
            followed,
            counts,
            failures=status.failures,
            backoff_until=status.backoff_until,
            since_claim_seconds=self._since_claim(key, members),
            now=self._clock.now(),
        )
        self._relaxed_above.pop(key, None)
        if decision.defers:
            self._relaxed_above[key] = band(followed, counts.allocated).buffer_min // 2
        await self._act(tried, self._pinned(pool, template), current, decision)
        await self._report(pool, status, current, decision)
        return self._requeue(pool, key, decision)

    def requeue_delay(self, key: Key) -> float:
        """Return after how many seconds to reconcile a pool whose members changed."""
        enough = self._relaxed_above.get(key)
        is_relaxed = enough is not None and len(self._pool_members.members(key).available) > enough
        return RELAXED_GATHER_SECONDS if is_relaxed else GATHER_SECONDS

    def _template(self, pool: SandboxPool) -> SandboxTemplateSpec:
        if pool.spec.template is not None:
            return pool.spec.template
        if pool.spec.template_ref is None:
            raise NotFoundError(f"pool {pool.key} has neither a template nor a templateRef")
        return resolve(self._templates, pool.spec.template_ref, pool.metadata.namespace)

    def _pinned(self, pool: SandboxPool, template: SandboxTemplateSpec) -> SandboxTemplateSpec:
        """Return the template with the version of its image that the pool has started with."""
        if pool.spec.template is not None or pool.spec.template_ref is None:
            return pinned(template, pool.status)
        found = find(self._templates, pool.spec.template_ref, pool.metadata.namespace)
        return pinned(template, found.status)

    def _count(self, pool: SandboxPool, members: Members, current: str) -> Counts:
        new = members.count(PoolState.CREATING, current)
        reset_new = members.count(PoolState.RECYCLING, current)
        stale = sum(1 for _ in self._stale(pool, current))
        ready = len(members.available) + len(members.reserved)
        return Counts(
            creating_new=new,
            creating_old=len(members.creating) - new,
            recycling_new=reset_new,
            recycling_old=len(members.recycling) - reset_new,
            available_new=ready - stale,
            available_old=stale,
            unusable=len(members.unusable),
            allocated=len(members.allocated),
            supply=self._supply(pool.key),
        )

    def _stale(self, pool: SandboxPool, current: str) -> Iterable[Sandbox]:
        return self._pool_members.stale(
            pool.key,
            revision=current,
            max_idle_age_seconds=pool.spec.max_idle_age_seconds,
            now=self._clock.now(),
        )

    def _since_claim(self, key: Key, members: Members) -> float:
        now = self._clock.monotonic()
        count, at = self._claims_seen.get(key, (0, -math.inf))
        if count != members.allocated_total:
            at = now
            self._claims_seen[key] = (members.allocated_total, at)
        return now - at

    async def _reap(self, pool: SandboxPool, members: Members, current: str) -> SandboxPoolStatus:
        """Delete unusable members; count consecutive failed starts."""
        to_delete = [
            item
            for item in members.unusable.values()
            if not item.is_deleting and strategies.should_delete(pool, item)
        ]
        failed = [item for item in to_delete if item.status.phase is Phase.FAILED]
        if failed:
            self._recorder.warning(pool, "SandboxFailed", failed[-1].status.message)
        ready, now = members.available.values(), self._clock.now()
        status = start_backoff.count_starts(pool.status, failed, ready, revision=current, now=now)
        await self._delete(to_delete)
        return status

    # ---- writes --------------------------------------------------------------------------

    async def _act(
        self, pool: SandboxPool, template: SandboxTemplateSpec, current: str, decision: PoolPlan
    ) -> None:
        members = self._pool_members.members(pool.key)
        victims = [
            *_oldest_revision_first(members.creating, current, decision.delete_creating),
            *_oldest_revision_first(members.available, current, decision.delete_available),
            *islice(self._stale(pool, current), decision.replace_available),
        ]
        if decision.replace_creating:
            old = (item for item in members.creating.values() if revision_of(item) != current)
            victims.extend(islice(old, decision.replace_creating))
        await self._delete(victims)
        await self._skip_resets(pool, members, current, decision)
        if decision.create:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(decision.create):
                    tasks.create_task(
                        self._write.create(child(pool, template, current)),
                        name=f"create a sandbox of {pool.key}",
                    )

    async def _skip_resets(
        self, pool: SandboxPool, members: Members, current: str, decision: PoolPlan
    ) -> None:
        """Delete returned sandboxes that the pool has no use for, and report each."""
        many = _oldest_revision_first(members.recycling, current, decision.delete_recycling)
        for victim in await self._delete(many):
            text = f"sandbox {victim.metadata.name} is deleted, not reset: {decision.reason}"
            self._recorder.normal(pool, "ResetSkipped", text)
        if not decision.replace_recycling:
            return
        old = [item for item in members.recycling.values() if revision_of(item) != current]
        for victim in await self._delete(old[: decision.replace_recycling]):
            text = f"sandbox {victim.metadata.name} is deleted, not reset: its template has changed"
            self._recorder.normal(pool, "ResetSkipped", text)

    async def _delete(self, victims: Iterable[Sandbox]) -> list[Sandbox]:
        """Delete sandboxes that are still as they were read; return those."""
        # Lock all first: a batch must not be given a member that is about to be deleted.
        locked = [
            victim for victim in tuple(victims) if self._pool_members.reserve_exact(victim.key)
        ]
        deleted: list[Sandbox] = []
        for victim in locked:
            try:
                version = victim.metadata.resource_version
                await self._write.delete(victim, resource_version=version)
                deleted.append(victim)
            except (ConflictError, NotFoundError):
                # Claimed, changed or deleted in the meantime: its event enqueues the pool again.
                self._pool_members.unreserve(victim.key)
            except BaseException:
                for left in locked:
                    self._pool_members.unreserve(left.key)
                raise
        return deleted

    async def _report(
        self, pool: SandboxPool, status: SandboxPoolStatus, current: str, decision: PoolPlan
    ) -> None:
        members = self._pool_members.members(pool.key)
        new = computed(
            pool,
            status,
            self._count(pool, members, current),
            decision,
            revision=current,
            now=self._clock.now(),
            image_problem=image_problem(members.creating.values()),
        )
        if new != pool.status:
            await self._write.update_status(structs.replace(pool, status=new))

    async def _degraded(self, pool: SandboxPool, reason: str, message: str) -> None:
        status = degraded(pool, reason, message, now=self._clock.now())
        if status != pool.status:
            self._recorder.warning(pool, reason, message)
            await self._write.update_status(structs.replace(pool, status=status))

    def _requeue(self, pool: SandboxPool, key: Key, decision: PoolPlan) -> Result:
        if decision.wait_seconds is not None:
            return RequeueAfter(max(decision.wait_seconds, 0.05), decision.reason)
        age = pool.spec.max_idle_age_seconds
        if age is None:
            return Done()
        births = (
            item.metadata.creation_timestamp
            for item in self._pool_members.members(key).available.values()
        )
        oldest = min((birth for birth in births if birth is not None), default=None)
        if oldest is None:
            return Done()
        due = oldest + timedelta(seconds=age)
        return RequeueAfter(
            max((due - self._clock.now()).total_seconds(), 1.0),
            "the oldest member reaches maxIdleAgeSeconds",
        )


def _oldest_revision_first(items: dict[Key, Sandbox], current: str, count: int) -> list[Sandbox]:
    if count <= 0:
        return []  # The usual case, on every change of the pool: no member is inspected.
    newest_first = list(reversed(items.values()))
    return sorted(newest_first, key=lambda item: revision_of(item) == current)[:count]
