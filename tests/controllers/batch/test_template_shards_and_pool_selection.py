"""Batches created from a template, and batches that take any pool."""

import asyncio
from datetime import timedelta

import pytest

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.batch import BatchPhase
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import Key, condition, is_true
from paddock.runtime.port import Blueprint, Instance
from tests.controllers.batch.make import batch, batching, pool

pytestmark = pytest.mark.looptime


async def test_a_template_batch_creates_its_shards_with_their_patches() -> None:
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


async def test_a_template_batch_replaces_lost_shards_and_scales_both_ways() -> None:
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


async def test_an_expired_template_batch_deletes_its_sandboxes() -> None:
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


async def test_batches_of_the_same_instant_with_any_pool_choose_different_ones() -> None:
    async with batching() as (_, batches):
        made = SandboxTemplateSpec(image="python")
        await batches.create(*(pool(name, most=6, template=made) for name in ("one", "two")))
        gangs = [
            batch(name, 5, pool_ref="*", template=made, min_available=5) for name in ("a", "b")
        ]
        await asyncio.gather(*(batches.create(gang) for gang in gangs))
        for name in ("a", "b"):
            await batches.ready(name)
        assert {batches.get(name).status.pool for name in ("a", "b")} == {"one", "two"}


async def test_a_batch_with_any_pool_gets_the_one_that_fits() -> None:
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


async def test_a_batch_without_a_fitting_pool_reports_why_and_continues_when_one_is_created() -> (
    None
):
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


async def test_a_template_batch_that_cannot_start_backs_off_and_reports_why() -> None:
    async with batching() as (world, batches):
        made: list[str] = []
        real = world.runtime.create

        async def refuse(blueprint: Blueprint) -> Instance:
            made.append(blueprint.uid)
            raise InvalidError("there is no image")

        world.runtime.create = refuse
        await batches.create(batch("b", 2, template=SandboxTemplateSpec()))
        await asyncio.sleep(600)
        # Doubling waits: eleven of each in ten minutes, where each fails quickly.
        assert 2 * 6 <= len(set(made)) <= 2 * 12
        status = batches.get("b").status
        assert "there is no image" in status.message
        assert status.phase is BatchPhase.PENDING
        world.runtime.create = real
        await world.until(lambda: batches.get("b").status.ready == 2, seconds=400)
        assert batches.get("b").status.message == ""


async def test_a_template_batch_with_a_corrected_template_is_retried_at_once() -> None:
    async with batching() as (world, batches):
        real = world.runtime.create

        async def refuse(blueprint: Blueprint) -> Instance:
            if blueprint.image == "nonesuch":
                raise InvalidError("there is no image")
            return await real(blueprint)

        world.runtime.create = refuse
        await batches.create(batch("b", 2, template=SandboxTemplateSpec(image="nonesuch")))
        await asyncio.sleep(600)
        await batches.change("b", template=SandboxTemplateSpec(image="base"))
        await world.until(lambda: batches.get("b").status.ready == 2, seconds=5)
        assert batches.get("b").status.message == ""


async def test_a_missing_pool_is_no_longer_reported_once_it_exists() -> None:
    async with batching() as (world, batches):
        await batches.create(batch("b", 2, pool_ref="late"))
        await world.until(lambda: "no pool" in batches.get("b").status.message)
        assert "default or default" not in batches.get("b").status.message
        await batches.create(pool("late", buffer=0, most=2))
        await batches.ready("b")
        await world.until(lambda: batches.get("b").status.message == "")
        assert is_true(batches.get("b").status.conditions, "PoolAssigned")


async def test_a_batch_whose_pool_is_deleted_reports_it_or_uses_another() -> None:
    async with batching() as (world, batches):
        special = SandboxTemplateSpec(image="special")
        await batches.create(pool("p", buffer=0, most=2, template=special))
        await batches.create(batch("named", 3, pool_ref="p"))
        await batches.ready("named", 2)
        await batches.create(batch("any", 0, pool_ref="*", template=special))
        await world.until(lambda: batches.get("any").status.pool == "p")
        await batches.change("any", replicas=1)
        await world.until(lambda: batches.get("any").status.observed_generation == 2)
        assert not batches.held("any")
        await batches.write.delete(world.pool("p"))
        await world.until(lambda: "no pool" in batches.get("named").status.message)
        await batches.create(pool("q", buffer=0, most=5, template=special))
        await batches.ready("any")
        assert batches.get("any").status.pool == "q"
        assert len(batches.held("named")) == 2
