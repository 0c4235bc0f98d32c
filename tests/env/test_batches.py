"""Batches that ask for an environment: its pools grow for them, as far as they may."""

import pytest

from paddock.resources.env import ScalingGroup
from paddock.resources.meta import condition
from tests.batch.make import batch, batching
from tests.env.make import environment, idle, member

pytestmark = pytest.mark.looptime


async def test_a_gang_that_is_larger_than_its_pool_waits_for_it_to_grow() -> None:
    async with batching() as (world, batches):
        group = ScalingGroup(min_replicas=2, max_replicas=20)
        await batches.create(environment({"only": member()}, group=group))
        await idle(world, "agents-only", 2)
        await batches.create(batch("gang", 12, pool_ref="agents", min_available=12))
        await batches.ready("gang")


@pytest.mark.parametrize("at_once", [None, 10])
async def test_a_batch_goes_to_the_member_that_can_hold_it(at_once: int | None) -> None:
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


async def test_a_gang_that_its_environment_can_never_hold_is_told_and_holds_nobody_up() -> None:
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
