"""The lifecycle of a sandbox through the manager: create, pause, resume, extend, kill."""

import asyncio
from collections.abc import Awaitable
from datetime import timedelta

import pytest
from msgspec import structs

from paddock.cache import states
from paddock.cache.states import SandboxState
from paddock.claims.caller import Caller
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import ConflictError, InvalidError, NotFoundError, QuotaExceededError
from paddock.manager.sandboxes.requests import SandboxFilter
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import LABEL_POOL, Phase, Sandbox
from paddock.resources.meta import Condition, Key
from paddock.runtime.port import InstanceState
from paddock.runtime.simulated import Operation, SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime

WANTED = NewSandbox(template="base")


def claim_of(sandbox: Sandbox):
    assert sandbox.spec.claim is not None
    return sandbox.spec.claim


async def test_a_warm_sandbox_is_claimed_and_replaced_in_its_pool() -> None:
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        assert sandbox.metadata.labels[LABEL_POOL] == "base"
        assert sandbox.metadata.owner_references == ()
        assert claim_of(sandbox).owner == "default"
        assert states.state(sandbox, world.plane.clock.now()) is SandboxState.RUNNING
        await world.stocked(2)


async def test_without_stock_a_sandbox_is_created_and_returned_ready() -> None:
    async with paddock(pool_size=0) as world:
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        assert sandbox.status.phase is Phase.RUNNING
        instance = await world.runtime.inspect(sandbox.metadata.uid)
        assert instance is not None
        assert instance.state is InstanceState.RUNNING


async def test_a_paused_sandbox_is_frozen_and_connect_wakes_it() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        sandbox_id = claim_of(sandbox).sandbox_id
        paused = await world.manager.lifecycle.pause(CALLER, sandbox_id)
        assert paused.status.phase is Phase.PAUSED
        instance = await world.runtime.inspect(sandbox.metadata.uid)
        assert instance is not None
        assert instance.state is InstanceState.FROZEN
        with pytest.raises(ConflictError):
            await world.manager.lifecycle.pause(CALLER, sandbox_id)
        again, resumed = await world.manager.lifecycle.connect(
            CALLER, sandbox_id, timeout_seconds=300
        )
        assert resumed
        assert again.status.phase is Phase.RUNNING
        _, resumed = await world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=300)
        assert not resumed


async def test_a_sandbox_is_deleted_at_its_deadline_and_its_instance_destroyed() -> None:
    async with paddock() as world:
        await world.stocked(1)  # the timeout counts from the claim
        sandbox = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=5)
        )
        sandbox_id = claim_of(sandbox).sandbox_id
        await asyncio.sleep(5.001)
        with pytest.raises(NotFoundError):
            await world.manager.queries.get(CALLER, sandbox_id)
        await world.until(lambda: world.provider.sandbox(sandbox.key) is None)
        assert await world.runtime.inspect(sandbox.metadata.uid) is None


async def test_auto_pause_keeps_a_sandbox_at_its_deadline() -> None:
    async with paddock() as world:
        await world.stocked(1)  # the timeout counts from the claim
        wanted = NewSandbox(template="base", timeout_seconds=5, auto_pause=True)
        sandbox = await world.manager.claims.create(CALLER, wanted)
        sandbox_id = claim_of(sandbox).sandbox_id

        def is_paused() -> bool:
            found = world.provider.sandbox(sandbox.key)
            return found is not None and found.status.phase is Phase.PAUSED

        await world.until(is_paused, seconds=6)
        await asyncio.sleep(1_000)
        kept = await world.manager.queries.get(CALLER, sandbox_id)
        assert kept.status.phase is Phase.PAUSED


async def test_set_timeout_may_shorten_the_deadline_and_connect_never_does() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=1_000)
        )
        sandbox_id = claim_of(sandbox).sandbox_id
        before = sandbox.spec.shutdown_time
        assert before is not None
        connected, _ = await world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=10)
        assert connected.spec.shutdown_time == before
        shorter = await world.manager.lifecycle.set_timeout(CALLER, sandbox_id, timeout_seconds=10)
        assert shorter.spec.shutdown_time is not None
        assert shorter.spec.shutdown_time < before - timedelta(seconds=800)


async def test_a_sandbox_without_a_deadline_never_gets_one() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=None)
        )
        sandbox_id = claim_of(sandbox).sandbox_id
        await world.manager.lifecycle.set_timeout(CALLER, sandbox_id, timeout_seconds=1)
        await world.manager.lifecycle.pause(CALLER, sandbox_id)
        await world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=1)
        await asyncio.sleep(1_000)
        kept = await world.manager.queries.get(CALLER, sandbox_id)
        assert kept.spec.shutdown_time is None
        assert kept.spec.pause_time is None


async def test_a_killed_sandbox_is_not_found_at_once() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        sandbox_id = claim_of(sandbox).sandbox_id
        await world.manager.lifecycle.kill(CALLER, sandbox_id)
        with pytest.raises(NotFoundError):
            await world.manager.queries.get(CALLER, sandbox_id)
        with pytest.raises(NotFoundError):
            await world.manager.lifecycle.kill(CALLER, sandbox_id)


async def test_a_sandbox_of_another_team_is_not_found() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        stranger = Caller("strangers")
        with pytest.raises(NotFoundError) as foreign:
            await world.manager.queries.get(stranger, claim_of(sandbox).sandbox_id)
        with pytest.raises(NotFoundError) as unknown:
            await world.manager.queries.get(stranger, "i" + "0" * 20)
        words = [str(error.value).split("'")[::2] for error in (foreign, unknown)]
        assert words[0] == words[1]


async def test_concurrent_pauses_end_paused_and_concurrent_resumes_end_running() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        sandbox_id = claim_of(sandbox).sandbox_id
        results = await asyncio.gather(
            *(world.manager.lifecycle.pause(CALLER, sandbox_id) for _ in range(20)),
            return_exceptions=True,
        )
        assert all(isinstance(item, (Sandbox, ConflictError)) for item in results)
        assert any(isinstance(item, Sandbox) for item in results)
        assert (await world.manager.queries.get(CALLER, sandbox_id)).status.phase is Phase.PAUSED
        resumes = await asyncio.gather(
            *(
                world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=300)
                for _ in range(20)
            )
        )
        assert all(item[0].status.phase is Phase.RUNNING for item in resumes)


async def test_two_hundred_creates_on_a_pool_of_fifty_never_share_a_sandbox() -> None:
    async with paddock(pool_size=50) as world:
        await world.stocked(50)
        made = await asyncio.gather(
            *(world.manager.claims.create(CALLER, WANTED) for _ in range(200))
        )
        assert len({item.metadata.uid for item in made}) == 200
        assert len({claim_of(item).sandbox_id for item in made}) == 200


async def test_a_quota_is_never_exceeded_and_resume_is_gated_too() -> None:
    async with paddock(pool_size=10) as world:
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.RUNNING, 7)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))

        def create() -> Awaitable[Sandbox]:
            return world.manager.claims.create(CALLER, WANTED)

        results = await asyncio.gather(*(create() for _ in range(30)), return_exceptions=True)
        made = [item for item in results if isinstance(item, Sandbox)]
        assert all(isinstance(item, (Sandbox, QuotaExceededError)) for item in results)
        while not world.knows_at_once and len(made) < 7:
            made.append(await world.within_quota(create))
        assert len(made) == 7
        first = claim_of(made[0]).sandbox_id
        await world.manager.lifecycle.pause(CALLER, first)
        replacement = await world.within_quota(create)
        with pytest.raises(QuotaExceededError):
            await world.manager.lifecycle.connect(CALLER, first, timeout_seconds=60)
        await world.manager.lifecycle.kill(CALLER, claim_of(replacement).sandbox_id)
        await world.within_quota(
            lambda: world.manager.lifecycle.connect(CALLER, first, timeout_seconds=60),
        )


async def test_the_quota_of_a_killed_sandbox_is_free_when_kill_returns() -> None:
    async with paddock() as world:
        world.runtime.set_latency(Operation.DESTROY, 30)
        limits = (
            QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 2),
            QuotaLimit(Dimension.COUNT, QuotaScope.RUNNING, 1),
        )
        await world.plane.keyring.set_team_quota("default", Quota(limits))
        create, lifecycle = world.manager.claims.create, world.manager.lifecycle
        asleep = await create(CALLER, NewSandbox(template="base", auto_pause=True))
        asleep = await lifecycle.pause(CALLER, claim_of(asleep).sandbox_id)
        for _ in range(3):
            made = await create(CALLER, WANTED)
            with pytest.raises(QuotaExceededError):
                await create(CALLER, WANTED)
            with pytest.raises(QuotaExceededError):
                await lifecycle.wake(asleep)
            await lifecycle.kill(CALLER, claim_of(made).sandbox_id)
            assert world.provider.sandbox(made.key) is not None, "its processes still end"
        await lifecycle.wake(asleep)


async def test_the_same_idempotency_key_gives_the_same_sandbox() -> None:
    async with paddock() as world:
        wanted = NewSandbox(template="base", idempotency_key="once")
        first, second = await asyncio.gather(
            world.manager.claims.create(CALLER, wanted), world.manager.claims.create(CALLER, wanted)
        )
        third = await world.manager.claims.create(CALLER, wanted)
        assert first.metadata.uid == second.metadata.uid == third.metadata.uid


async def test_sandboxes_are_created_from_a_snapshot_and_cloned_by_a_fork() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        sandbox_id = claim_of(sandbox).sandbox_id
        stored = await world.manager.snapshots.create(CALLER, sandbox_id, name="trained")
        for reference in (stored.status.checkpoint_id, "trained", "default/trained:default"):
            clone = await world.manager.claims.create(CALLER, NewSandbox(template=reference))
            assert clone.spec.restore_from == stored.status.checkpoint_id
        forks = await world.manager.snapshots.fork(CALLER, sandbox_id, count=3, timeout_seconds=60)
        assert len({item.sandbox.metadata.uid for item in forks if item.sandbox}) == 3


async def test_lists_are_paged_and_filtered() -> None:
    async with paddock() as world:
        for number in range(5):
            await world.manager.claims.create(
                CALLER, NewSandbox(template="base", metadata={"n": str(number % 2)})
            )
            await asyncio.sleep(1)
        odd = SandboxFilter(metadata={"n": "1"})
        page = world.manager.queries.page(CALLER, odd, limit=10, token=None, ascending=False)
        assert len(page.items) == 2
        seen: list[str] = []
        token = None
        while True:
            page = world.manager.queries.page(
                CALLER, SandboxFilter(), limit=2, token=token, ascending=True
            )
            seen += [claim_of(item).sandbox_id for item in page.items]
            token = page.next_token
            if token is None:
                break
        assert len(seen) == len(set(seen)) == 5


async def test_a_pool_whose_sandboxes_fail_backs_off_and_recovers() -> None:
    async with paddock(pool_size=0) as world:
        for _ in range(3):
            world.runtime.fail_next(Operation.CREATE, InvalidError("the image is broken"))
        await world.provider.write.mutate(
            SandboxPool,
            Key("default", "base"),
            lambda pool: structs.replace(pool, spec=structs.replace(pool.spec, replicas=2)),
        )
        await world.until(lambda: world.pool().status.failures > 0)
        failing = degraded(world.pool())
        assert (failing.status, failing.reason) == ("True", "CrashLooping")
        assert failing.message
        await world.stocked(2)
        await world.until(lambda: world.pool().status.failures == 0)
        recovered = degraded(world.pool())
        assert (recovered.status, recovered.reason) == ("False", "AsExpected")


def degraded(pool: SandboxPool) -> Condition:
    [found] = [item for item in pool.status.conditions if item.type == "Degraded"]
    return found


async def test_a_sandbox_that_dies_is_failed_and_not_listed() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        world.runtime.crash(sandbox.metadata.uid, "out of memory")
        await world.until(
            lambda: (
                (found := world.provider.sandbox(sandbox.key)) is not None
                and found.status.phase is Phase.FAILED
            )
        )
        with pytest.raises(NotFoundError):
            await world.manager.queries.get(CALLER, claim_of(sandbox).sandbox_id)


async def test_deadlines_that_passed_during_a_downtime_are_applied_afterwards() -> None:
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock)
    wishes = {
        "ends": NewSandbox(template="base", timeout_seconds=60),
        "pauses": NewSandbox(template="base", timeout_seconds=60, auto_pause=True),
        "kept": NewSandbox(template="base", timeout_seconds=60, paused_retention_seconds=3600),
        "dropped": NewSandbox(template="base", timeout_seconds=60, paused_retention_seconds=30),
        "stays": NewSandbox(template="base", timeout_seconds=None),
    }
    made = {}
    async with paddock(store=store, runtime=runtime, clock=clock) as world:
        for name, wish in wishes.items():
            made[name] = (await world.manager.claims.create(CALLER, wish)).key
        for name in ("kept", "dropped"):
            sandbox = world.provider.sandbox(made[name])
            assert sandbox is not None
            assert sandbox.spec.claim is not None
            await world.manager.lifecycle.pause(CALLER, sandbox.spec.claim.sandbox_id)
    await asyncio.sleep(600)
    async with paddock(store=store, runtime=runtime, clock=clock) as world:
        await asyncio.sleep(5)
        phases = {
            name: found.status.phase if (found := world.provider.sandbox(key)) else None
            for name, key in made.items()
        }
        assert phases == {
            "ends": None,
            "pauses": Phase.PAUSED,
            "kept": Phase.PAUSED,
            "dropped": None,
            "stays": Phase.RUNNING,
        }
