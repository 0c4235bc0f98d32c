"""Strategies selected by name: eviction, updates, algorithms; unknown names are errors."""

import asyncio

import pytest
from msgspec import structs

from paddock.controllers.pool.strategies import LABEL_EVICTION_HANDLER, LABEL_UPDATE_STRATEGY
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.sandbox import LABEL_EVICT, Sandbox
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Key, condition, with_meta
from tests.controllers.batch.make import batch, batching, pool

pytestmark = pytest.mark.looptime


async def test_kept_evicted_sandboxes_exist_but_are_not_claimable() -> None:
    async with batching() as (world, batches):
        labels = {LABEL_EVICTION_HANDLER: "keep"}
        await batches.create(pool("p", buffer=1, most=5, pool_labels=labels))
        await world.stocked(1, "p")
        (key,) = world.plane.pool_members.members(Key("default", "p")).available
        await batches.write.mutate(
            Sandbox,
            key,
            lambda old: with_meta(old, labels={**old.metadata.labels, LABEL_EVICT: "look"}),
        )
        await asyncio.sleep(30)
        found = world.provider.sandbox(key)
        assert found is not None
        await batches.create(batch("b", 2, pool_ref="p"))
        await batches.ready("b")
        assert found.metadata.uid not in batches.held("b").values()


async def test_with_on_delete_idle_sandboxes_survive_a_template_change() -> None:
    async with batching() as (world, batches):
        labels = {LABEL_UPDATE_STRATEGY: "onDelete"}
        await batches.create(pool("p", buffer=2, most=5, pool_labels=labels))
        await world.stocked(2, "p")
        before = set(world.plane.pool_members.members(Key("default", "p")).available)
        found = world.pool("p")
        new = SandboxTemplateSpec(env={"VERSION": "2"})
        await batches.write.update(
            structs.replace(found, spec=structs.replace(found.spec, template=new))
        )
        await asyncio.sleep(60)
        assert set(world.plane.pool_members.members(Key("default", "p")).available) == before


async def test_an_unknown_name_is_reported_in_the_pools_status() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=1, pool_labels={LABEL_UPDATE_STRATEGY: "magic"}))
        await world.until(
            lambda: condition(world.pool("p").status.conditions, "Degraded") is not None
        )
        found = condition(world.pool("p").status.conditions, "Degraded")
        assert found is not None
        assert found.reason == "UnknownStrategy"
        assert "onDelete" in found.message


async def test_spread_serves_all_batches_evenly_and_packed_one_after_the_other() -> None:
    async with batching() as (_, batches):
        await batches.create(
            pool("wide", most=4, algorithm="spread"), pool("deep", most=4, algorithm="packed")
        )
        for place in ("wide", "deep"):
            await batches.create(*(batch(f"{place}{n}", 3, pool_ref=place) for n in range(2)))
        await asyncio.sleep(60)
        shares = {
            place: sorted(len(batches.held(f"{place}{n}")) for n in range(2))
            for place in ("wide", "deep")
        }
        assert sum(shares["wide"]) == sum(shares["deep"]) == 4
        assert shares["deep"] == [1, 3]


async def test_an_unsatisfiable_gang_is_reported_and_blocks_no_other_batch() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", most=3))
        await batches.create(batch("huge", 5, pool_ref="p", min_available=5))
        await asyncio.sleep(5)
        await batches.create(batch("small", 3, pool_ref="p"))
        await batches.ready("small")
        assert batches.held("huge") == {}
        await asyncio.sleep(10)
        events = (await world.store.list(Event, namespace="default")).items
        assert "Unsatisfiable" in {event.reason for event in events}
