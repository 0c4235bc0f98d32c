"""Batches on an environment: its pools grow for them within their limits."""

import asyncio

import pytest

from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.env import ScalingGroup
from paddock.resources.kinds.sandbox import LABEL_POOL
from paddock.resources.meta import condition
from paddock.runtime.simulated import Operation
from tests.controllers.batch.make import batch, batching
from tests.controllers.env.make import environment, idle, member
from tests.scenario.paddock import CALLER

pytestmark = pytest.mark.looptime


async def test_a_gang_that_is_larger_than_its_pool_waits_for_it_to_grow() -> None:
    async with batching() as (world, batches):
        group = ScalingGroup(min_replicas=2, max_replicas=20)
        await batches.create(environment({"only": member()}, group=group))
        await idle(world, "agents-only", 2)
        await batches.create(batch("gang", 12, pool_ref="agents", min_available=12))
        await batches.ready("gang")


@pytest.mark.parametrize("at_once", [None, 10])
async def test_a_batch_is_assigned_to_a_member_that_is_large_enough(at_once: int | None) -> None:
    async with batching() as (world, batches):
        group = ScalingGroup(min_replicas=2, max_replicas=20)
        members = {"first": member(max_replicas=6), "large": member(priority=1)}
        await batches.create(environment(members, group=group))
        await idle(world, "agents-first", 2)
        await batches.create(batch("b", 10, pool_ref="agents", min_available=at_once))
        await batches.ready("b")
        await batches.create(batch("small", 2, pool_ref="agents"))
        await batches.ready("small")
        assert batches.get("small").status.pool == "agents-first"


async def test_the_member_that_serves_a_batch_grows_for_it_and_no_other_does() -> None:
    async with batching() as (world, batches):
        members = {"first": member(), "stocked": member(priority=1, min_replicas=2)}
        await batches.create(environment(members, group=ScalingGroup(max_replicas=20)))
        await idle(world, "agents-stocked", 2)
        await batches.create(batch("b", 8, pool_ref="agents"))
        await batches.ready("b")
        assert batches.get("b").status.pool == "agents-stocked"


async def test_a_gang_too_large_for_its_environment_is_reported_and_blocks_no_other() -> None:
    async with batching() as (world, batches):
        group = ScalingGroup(min_replicas=2, max_replicas=20)
        await batches.create(environment({"only": member(max_replicas=8)}, group=group))
        await idle(world, "agents-only", 2)
        await batches.create(batch("gang", 12, pool_ref="agents", min_available=12))

        def why() -> str:
            told = condition(batches.get("gang").status.conditions, "PoolAllocationPending")
            return told.reason if told is not None else ""

        await world.until(lambda: why() == "Unsatisfiable")
        await batches.create(batch("small", 5, pool_ref="agents"))
        await batches.ready("small")
        assert not batches.held("gang")


async def test_a_batch_waiting_for_a_full_member_does_not_block_claims_on_its_siblings() -> None:
    async with batching() as (world, batches):
        members = {"first": member(max_replicas=4), "second": member(max_replicas=4, priority=1)}
        group = ScalingGroup(min_replicas=1, max_replicas=8)
        await batches.create(environment(members, group=group))
        await idle(world, "agents-first", 1)
        await batches.create(batch("b", 40, pool_ref="agents"))
        await world.until(lambda: len(batches.held("b")) == 4, seconds=120)
        box = await world.manager.claims.create(CALLER, NewSandbox(template="agents"))
        assert box.metadata.labels[LABEL_POOL] == "agents-second"


async def test_batches_of_the_same_instant_choose_members_that_can_hold_them() -> None:
    async with batching() as (world, batches):
        names = ("first", "second", "third")
        members = {name: member(min_replicas=1, max_replicas=6) for name in names}
        group = ScalingGroup(max_replicas=18)
        await batches.create(environment(members, group=group))
        for name in names:
            await idle(world, f"agents-{name}", 1)
        gangs = [batch(f"b{i}", 5, pool_ref="agents", min_available=5) for i in range(3)]
        await asyncio.gather(*(batches.create(gang) for gang in gangs))
        for gang in gangs:
            await batches.ready(gang.metadata.name)
        chosen = {batches.get(gang.metadata.name).status.pool for gang in gangs}
        assert chosen == {"agents-first", "agents-second", "agents-third"}


async def test_a_batch_avoids_the_member_that_an_earlier_one_waits_for() -> None:
    async with batching() as (world, batches):
        sizes = {"min_replicas": 1, "max_replicas": 6}
        members = {"first": member(**sizes), "second": member(priority=1, **sizes)}
        group = ScalingGroup(max_replicas=12)
        await batches.create(environment(members, group=group))
        for name in members:
            await idle(world, f"agents-{name}", 1)
        world.runtime.set_latency(Operation.CREATE, 20)
        await batches.create(batch("b", 5, pool_ref="agents", min_available=5))
        await asyncio.sleep(5)
        assert not batches.held("b")
        await batches.create(batch("late", 5, pool_ref="agents", min_available=5))
        for name in ("b", "late"):
            await world.until(lambda name=name: len(batches.held(name)) == 5, seconds=120)
        assert batches.get("late").status.pool != batches.get("b").status.pool
