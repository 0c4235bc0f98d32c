"""Batches made directly from a template, and batches that take any pool."""

import asyncio
from datetime import timedelta

import pytest

from paddock.resources.batch import BatchPhase
from paddock.resources.meta import Key, condition, is_true
from paddock.resources.template import Resources, SandboxTemplateSpec
from tests.batch.make import batch, batching, pool

pytestmark = pytest.mark.looptime


async def test_a_direct_batch_makes_its_shards_with_their_patches() -> None:
    async with batching() as (world, batches):
        template = SandboxTemplateSpec(env={"A": "1"})
        patches = ({}, {"env": {"B": "2"}}, {"image": "other"})
        await batches.create(batch("b", 3, template=template, shard_patches=patches))
        await batches.ready("b")
        made = [
            world.provider.sandbox(Key("default", item.sandbox))
            for item in batches.get("b").status.allocations
        ]
        specs = [item.spec.template for item in made if item and item.spec.template]
        assert [item.metadata.name for item in made if item] == ["b-0", "b-1", "b-2"]
        assert [dict(item.env) for item in specs] == [{"A": "1"}, {"A": "1", "B": "2"}, {"A": "1"}]
        assert [item.image for item in specs] == ["base", "base", "other"]
        found = await world.http.get(
            f"/sandboxes/{batches.get('b').status.allocations[1].sandbox_id}"
        )
        assert found.status_code == 200
        await batches.delete("b")
        await world.until(lambda: not world.provider.sandboxes_of_batch(Key("default", "b")))


async def test_a_direct_batch_replaces_lost_shards_and_scales_both_ways() -> None:
    async with batching() as (world, batches):
        await batches.create(batch("b", 3, template=SandboxTemplateSpec()))
        await batches.ready("b")
        before = batches.held("b")
        world.runtime.crash(before[1])
        await world.until(lambda: batches.held("b").get(1) not in (None, before[1]))
        await batches.ready("b")
        await batches.change("b", replicas=5)
        await batches.ready("b")
        await batches.change("b", replicas=2)
        await world.until(lambda: len(world.provider.sandboxes_of_batch(Key("default", "b"))) == 2)
        assert batches.held("b")[0] == before[0]


async def test_an_expired_direct_batch_takes_its_sandboxes_with_it() -> None:
    async with batching() as (world, batches):
        end = world.plane.clock.now() + timedelta(seconds=10)
        await batches.create(batch("b", 2, template=SandboxTemplateSpec(), expire_time=end))
        await batches.ready("b")
        held = batches.held("b")
        await asyncio.sleep(12)
        assert batches.is_gone("b")
        await world.until(lambda: not world.provider.sandboxes_of_batch(Key("default", "b")))
        for uid in held.values():
            assert await world.runtime.inspect(uid) is None


async def test_a_batch_that_takes_any_pool_gets_the_one_that_fits() -> None:
    async with batching() as (_, batches):
        small = Resources(cpu="1", memory="1Gi")
        large = Resources(cpu="4", memory="8Gi")
        await batches.create(
            pool("tiny", template=SandboxTemplateSpec(image="python", resources=small)),
            pool("big", template=SandboxTemplateSpec(image="python", resources=large)),
            pool("full", most=1, template=SandboxTemplateSpec(image="python", resources=large)),
            pool("node", template=SandboxTemplateSpec(image="node", resources=large)),
        )
        wish = SandboxTemplateSpec(image="python", resources=Resources(cpu="2", memory="4Gi"))
        await batches.create(batch("b", 2, pool_ref="*", template=wish))
        await batches.ready("b")
        assert batches.get("b").status.pool == "big"
        assert is_true(batches.get("b").status.conditions, "PoolAssigned")


async def test_a_batch_that_no_pool_fits_says_why_and_goes_on_when_one_comes() -> None:
    async with batching() as (world, batches):
        wish = SandboxTemplateSpec(image="rare")
        await batches.create(batch("b", 1, pool_ref="*", template=wish))
        await world.until(
            lambda: condition(batches.get("b").status.conditions, "PoolAssigned") is not None
        )
        found = condition(batches.get("b").status.conditions, "PoolAssigned")
        assert found is not None
        assert "image" in found.message
        await batches.create(pool("rare", template=wish))
        await batches.ready("b")
        assert batches.get("b").status.phase is BatchPhase.RUNNING


async def test_a_batch_of_another_namespace_is_served_by_the_shared_pool() -> None:
    async with batching() as (_, batches):
        await batches.create(pool("p", buffer=0, most=10))
        await batches.create(batch("b", 2, namespace="team", pool_ref="p"))
        await batches.ready("b", namespace="team")
        status = batches.get("b", "team").status
        assert status.pool == "default/p"
        assert {item.namespace for item in status.allocations} == {"default"}
