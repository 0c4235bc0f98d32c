"""Batches served from pools: allocation, loss, scale-in and -out, expiry, pause, release."""

import asyncio
from datetime import timedelta

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import UnsupportedError
from paddock.resources.kinds.batch import BatchPhase
from paddock.resources.kinds.pool import RecycleStrategy, RecycleType, SandboxPool
from paddock.resources.kinds.sandbox import LABEL_EVICT, LABEL_POOL, Sandbox
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import (
    Condition,
    ConditionStatus,
    Key,
    condition,
    is_true,
    with_meta,
)
from paddock.runtime.simulated import Operation, SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.controllers.batch.make import Batches, batch, batching, pool, task
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime


async def test_a_batch_gets_all_its_sandboxes_from_its_pool() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=5, most=10))
        await world.stocked(5, "p")
        await batches.create(batch("b", 5, pool_ref="p"))
        await batches.ready("b")
        status = batches.get("b").status
        assert status.phase is BatchPhase.RUNNING
        assert is_true(status.conditions, "Ready")
        assert sorted(batches.held("b")) == [0, 1, 2, 3, 4]
        assert len({item.sandbox_id for item in status.allocations}) == 5
        assert batches.allocated("p") == 5


async def test_sandboxes_of_a_batch_are_not_claimable() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=2, most=100))
        await world.stocked(2, "p")
        await batches.create(batch("b", 6, pool_ref="p"))
        claims = [world.manager.claims.create(CALLER, NewSandbox(template="p")) for _ in range(6)]
        made = await asyncio.gather(*claims)
        await batches.ready("b")
        claimed = {item.metadata.uid for item in made}
        assert len(claimed) == 6
        assert not claimed & set(batches.held("b").values())


async def test_concurrent_batches_share_no_sandbox_and_the_counts_add_up() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=2, most=20))
        await batches.create(*(batch(f"b{n}", n, pool_ref="p") for n in (1, 3, 2)))
        for n in (1, 2, 3):
            await batches.ready(f"b{n}")
        held = [uid for n in (1, 2, 3) for uid in batches.held(f"b{n}").values()]
        assert len(held) == len(set(held)) == 6
        await world.until(lambda: batches.pool_status("p").allocated == 6)
        await world.until(lambda: batches.pool_status("p").available == 2)
        status = batches.pool_status("p")
        assert status.available + status.creating + status.allocated == status.total


async def test_pool_max_is_never_exceeded_and_a_waiting_batch_is_served_after_a_release() -> None:
    async with batching() as (world, batches):
        seen: list[int] = []
        world.plane.pool_members.on_change(lambda key: seen.append(_size(world, key)))
        await batches.create(pool("p", buffer=1, most=3))
        await batches.create(batch("first", 3, pool_ref="p"))
        await batches.ready("first")
        await batches.create(batch("second", 2, pool_ref="p"))
        await asyncio.sleep(60)
        assert batches.held("second") == {}
        assert is_true(batches.get("second").status.conditions, "PoolAllocationPending")
        assert not is_true(batches.get("second").status.conditions, "Ready")
        await batches.delete("first")
        await batches.ready("second")
        assert max(seen) <= 3


def _size(world, key: Key) -> int:
    members = world.plane.pool_members.members(key)
    return sum(map(len, (members.available, members.reserved, members.creating, members.allocated)))


async def test_staggered_releases_return_exactly_what_they_held() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=10))
        await batches.create(*(batch(f"b{n}", n, pool_ref="p") for n in (1, 3, 2)))
        for n in (1, 2, 3):
            await batches.ready(f"b{n}")
        for name, left in (("b1", 5), ("b3", 2), ("b2", 0)):
            await batches.delete(name)
            await world.until(lambda left=left: batches.pool_status("p").allocated == left)
            await asyncio.sleep(30)
            assert batches.pool_status("p").allocated == left


async def test_two_pools_do_not_mix() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("left", buffer=2), pool("right", buffer=2))
        await batches.create(batch("l", 4, pool_ref="left"), batch("r", 4, pool_ref="right"))
        await batches.ready("l")
        await batches.ready("r")
        for name, home in (("l", "left"), ("r", "right")):
            for item in batches.get(name).status.allocations:
                sandbox = world.provider.sandbox(Key("default", item.sandbox))
                assert sandbox is not None
                assert sandbox.metadata.labels[LABEL_POOL] == home


async def test_with_noop_the_same_sandboxes_are_reused() -> None:
    async with batching() as (_, batches):
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await batches.create(pool("p", buffer=3, most=3, recycle_strategy=strategy))
        await batches.create(batch("one", 3, pool_ref="p"))
        await batches.ready("one")
        first = set(batches.held("one").values())
        await batches.delete("one")
        await batches.create(batch("two", 3, pool_ref="p"))
        await batches.ready("two")
        assert set(batches.held("two").values()) == first


async def test_with_delete_used_sandboxes_are_deleted() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=2, most=4))
        await batches.create(batch("one", 2, pool_ref="p"))
        await batches.ready("one")
        used = batches.held("one").values()
        await batches.delete("one")
        for uid in used:
            await until_async(world, lambda uid=uid: _is_gone(world, uid))


async def _is_gone(world, uid: str) -> bool:
    return await world.runtime.inspect(uid) is None


async def until_async(world, check) -> None:
    async with asyncio.timeout(30):
        while not await check():
            await asyncio.sleep(0.05)


async def test_with_restart_the_sandbox_is_kept_and_reset() -> None:
    async with batching() as (world, batches):
        strategy = RecycleStrategy(type=RecycleType.RESTART)
        await batches.create(pool("p", buffer=1, most=1, recycle_strategy=strategy))
        await batches.create(batch("one", 1, pool_ref="p"))
        await batches.ready("one")
        (uid,) = batches.held("one").values()
        world.runtime.files(uid)["/dirt"] = "x"
        await batches.delete("one")
        await batches.create(batch("two", 1, pool_ref="p"))
        await batches.ready("two")
        assert list(batches.held("two").values()) == [uid]
        assert world.runtime.files(uid) == {}
        name = batches.get("two").status.allocations[0].sandbox
        sandbox = world.provider.sandbox(Key("default", name))
        assert sandbox is not None
        assert sandbox.status.recycled_count == 1


async def test_a_reset_that_hangs_ends_in_a_new_sandbox() -> None:
    async with batching() as (world, batches):
        strategy = RecycleStrategy(type=RecycleType.RESTART, timeout_seconds=20)
        await batches.create(pool("p", buffer=1, most=1, recycle_strategy=strategy))
        await batches.create(batch("one", 1, pool_ref="p"))
        await batches.ready("one")
        (uid,) = batches.held("one").values()
        world.runtime.set_latency(Operation.START, 60)
        await batches.delete("one")
        await batches.create(batch("two", 1, pool_ref="p"))
        await world.until(lambda: batches.get("two").status.ready == 1, seconds=300)
        assert uid not in batches.held("two").values()


async def test_an_evicted_sandbox_is_deleted_after_its_release() -> None:
    async with batching() as (world, batches):
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await batches.create(pool("p", buffer=2, most=6, recycle_strategy=strategy))
        await batches.create(batch("b", 1, pool_ref="p"))
        await batches.ready("b")
        await world.stocked(2, "p")
        held = batches.get("b").status.allocations[0]
        idle = tuple(world.plane.pool_members.members(Key("default", "p")).available)
        for key in (Key("default", held.sandbox), *idle):
            await batches.write.mutate(
                Sandbox,
                key,
                lambda old: with_meta(old, labels={**old.metadata.labels, LABEL_EVICT: "yes"}),
            )
        await asyncio.sleep(30)
        assert batches.held("b") == {0: held.uid}
        assert await world.runtime.inspect(held.uid) is not None
        assert all(world.provider.sandbox(key) is None for key in idle)
        await batches.delete("b")
        await until_async(world, lambda: _is_gone(world, held.uid))


async def test_an_expired_batch_is_deleted_and_its_sandboxes_return_to_the_pool() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=5))
        end = world.plane.clock.now() + timedelta(seconds=20)
        await batches.create(batch("b", 3, pool_ref="p", expire_time=end))
        await batches.ready("b")
        await asyncio.sleep(19)
        assert not batches.is_gone("b")
        await world.until(lambda: batches.is_gone("b"), seconds=5)
        await world.until(lambda: batches.pool_status("p").allocated == 0)


async def test_a_lost_shard_is_replaced_and_keeps_its_index() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=1, most=10))
        await batches.create(batch("b", 4, pool_ref="p"))
        await batches.ready("b")
        before = batches.held("b")
        world.runtime.crash(before[2], "out of memory")
        await world.until(lambda: batches.held("b").get(2) not in (None, before[2]))
        await batches.ready("b")
        after = batches.held("b")
        assert {shard: after[shard] for shard in (0, 1, 3)} == {
            shard: before[shard] for shard in (0, 1, 3)
        }
        assert world.pool("p").status.failures == 0


async def test_scale_in_releases_the_named_shards_and_scale_out_fills_the_gaps() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=10))
        annotations = {"paddock.dev/scale-in-shards": "1"}
        await batches.create(batch("b", 5, pool_ref="p", annotations=annotations))
        await batches.ready("b")
        before = batches.held("b")
        await batches.change("b", replicas=3)
        await world.until(lambda: len(batches.held("b")) == 3)
        kept = batches.held("b")
        assert sorted(kept) == [0, 2, 3]
        assert all(before[shard] == uid for shard, uid in kept.items())
        await world.until(lambda: batches.pool_status("p").allocated == 3)
        await batches.change("b", replicas=5)
        await batches.ready("b")
        assert sorted(batches.held("b")) == [0, 1, 2, 3, 4]
        assert batches.held("b")[3] == before[3]


async def test_a_gang_waits_until_all_its_sandboxes_are_available() -> None:
    async with batching() as (_, batches):
        await batches.create(pool("p", buffer=2, most=4))
        await batches.create(batch("small", 2, pool_ref="p"))
        await batches.ready("small")
        await batches.create(batch("gang", 4, pool_ref="p", min_available=4))
        await asyncio.sleep(30)
        assert batches.held("gang") == {}
        await batches.delete("small")
        await batches.ready("gang")


async def test_a_refused_pause_reports_the_reason_and_can_be_retried() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=10))
        await batches.create(batch("b", 3, pool_ref="p"))
        await batches.ready("b")
        held = batches.held("b")
        real = world.runtime.freeze

        async def refuse(uid: str):
            if uid == held[1]:
                raise UnsupportedError("a device is open")
            return await real(uid)

        def paused() -> Condition | None:
            return condition(batches.get("b").status.conditions, "Paused")

        world.runtime.freeze = refuse
        await batches.change("b", pause=True)
        await world.until(lambda: (told := paused()) is not None and told.reason == "PauseFailed")
        told = paused()
        assert told is not None
        assert told.message == "1 of 3 shards could not be paused; shard 1: a device is open"
        world.runtime.freeze = real
        await batches.change("b", pause=False)
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.RUNNING)
        await batches.change("b", pause=True)
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.PAUSED)
        told = paused()
        assert told is not None
        assert told.status is ConditionStatus.TRUE


async def test_after_a_restart_every_batch_keeps_its_sandboxes() -> None:
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock)
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=2, most=20))
        await batches.create(batch("a", 3, pool_ref="p"), batch("b", 4, pool_ref="p"))
        await batches.ready("a")
        await batches.ready("b")
        before = {**batches.held("a")}, {**batches.held("b")}
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        batches = Batches(world)
        await world.stocked(2, "p")
        assert batches.allocated("p") == 7
        await batches.create(batch("c", 5, pool_ref="p"))
        await batches.ready("c")
        assert (batches.held("a"), batches.held("b")) == before
        everybody = [uid for name in "abc" for uid in batches.held(name).values()]
        assert len(everybody) == len(set(everybody)) == 12


async def test_sandboxes_of_a_deleted_batch_are_collected_and_never_reused() -> None:
    async with batching() as (_, batches):
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await batches.create(pool("p", buffer=0, most=2, recycle_strategy=strategy))
        await batches.create(batch("b", 2, pool_ref="p"))
        await batches.ready("b")
        used = set(batches.held("b").values())
        gone = await batches.write.update(with_meta(batches.get("b"), finalizers=()))
        await batches.write.delete(gone)
        await batches.create(batch("next", 2, pool_ref="p"))
        await batches.ready("next")
        assert not used & set(batches.held("next").values())


async def test_a_malformed_batch_is_quarantined_and_others_continue() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=1, most=10))
        bad = ({"spec": {"process": {"command": "not a list"}}},)
        await batches.create(
            batch("bad", 2, pool_ref="p", task_template=task("true"), shard_task_patches=bad),
            batch("good", 2, pool_ref="p"),
        )
        await batches.ready("good")
        await world.until(lambda: is_true(batches.get("bad").status.conditions, "Quarantined"))
        assert "shardTaskPatches[0]" in batches.get("bad").status.message
        assert batches.held("bad") == {}
        await batches.change("bad", shard_task_patches=())
        await world.until(lambda: batches.get("bad").status.phase is BatchPhase.COMPLETED)


async def test_two_batches_with_the_same_sandbox_are_repaired() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=10))
        await batches.create(batch("a", 1, pool_ref="p"), batch("b", 1, pool_ref="p"))
        await batches.ready("a")
        await batches.ready("b")
        stolen = structs.replace(
            batches.get("b").status, allocations=batches.get("a").status.allocations
        )
        await batches.write.update_status(structs.replace(batches.get("b"), status=stolen))
        await world.until(lambda: batches.held("b").get(0) != batches.held("a")[0])
        await batches.ready("b")
        assert set(batches.held("a").values()).isdisjoint(batches.held("b").values())


async def test_a_rolling_update_touches_only_idle_ones_within_its_budget() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=10, most=40))
        await batches.create(batch("b", 3, pool_ref="p"))
        await batches.ready("b")
        await world.stocked(10, "p")
        held = batches.held("b")
        lowest: list[int] = []
        key = Key("default", "p")
        members = world.plane.pool_members.members
        world.plane.pool_members.on_change(lambda _: lowest.append(len(members(key).available)))
        new = SandboxTemplateSpec(env={"VERSION": "2"})
        found = world.pool("p")
        await batches.write.update(
            structs.replace(found, spec=structs.replace(found.spec, template=new))
        )
        await batches.create(batch("during", 2, pool_ref="p"))
        await batches.ready("during")
        await world.until(
            lambda: (s := batches.pool_status("p")).updated_available == s.available == 10
        )
        assert batches.held("b") == held
        # 20 % of ten, one more, and the two that were allocated in the meantime.
        assert min(lowest) >= 10 - 3 - 2


async def test_deleting_a_pool_keeps_the_sandboxes_of_batches() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=2, most=8))
        await batches.create(batch("b", 4, pool_ref="p", task_template=task("sleep", "30")))
        await batches.ready("b")
        before = batches.held("b")
        await world.until(lambda: batches.get("b").status.task_running == 4)
        await batches.write.delete(world.pool("p"))
        gone = Key("default", "p")
        await world.until(lambda: world.provider.get(SandboxPool, gone) is None)
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.COMPLETED)
        assert batches.held("b") == before
        assert all(item.attempt == 1 for item in batches.get("b").status.tasks)
        # Idle sandboxes are deleted with the pool, the others with the batch.
        await world.until(lambda: _uids(world) == set(before.values()))
        await batches.delete("b")
        await world.until(lambda: not _uids(world))


def _uids(world) -> set[str]:
    return {item.metadata.uid for item in world.provider.all(Sandbox)}
