"""Pools over time: replaced, evicted, aged, updated, recycled, deleted."""

import asyncio

import pytest
from msgspec import structs

from paddock.cache.pool_members import revision_of
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.pool import (
    Capacity,
    RecycleStrategy,
    RecycleType,
    SandboxPool,
    UpdateStrategy,
)
from paddock.resources.kinds.sandbox import LABEL_EVICT, LABEL_POOL, Phase, Sandbox
from paddock.resources.kinds.template import NetworkPolicy, SandboxTemplate
from paddock.resources.meta import Key, with_meta
from paddock.runtime.simulated import Operation
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

IDLE_SECONDS = 600

WANTED = NewSandbox(template="base")
BASE = Key("default", "base")


def idle(world: World) -> list[Sandbox]:
    return list(world.plane.pool_members.members(BASE).available.values())


def uids(items: list[Sandbox]) -> set[str]:
    return {item.metadata.uid for item in items}


async def change_pool(world: World, **spec) -> None:
    await world.provider.write.mutate(
        SandboxPool,
        BASE,
        lambda pool: structs.replace(pool, spec=structs.replace(pool.spec, **spec)),
    )


async def change_template(world: World, **spec) -> None:
    await world.provider.write.mutate(
        SandboxTemplate,
        BASE,
        lambda found: structs.replace(found, spec=structs.replace(found.spec, **spec)),
    )


def sandbox_id(sandbox: Sandbox) -> str:
    assert sandbox.spec.claim is not None
    return sandbox.spec.claim.sandbox_id


async def test_an_evicted_idle_sandbox_is_replaced_and_a_claimed_one_stays() -> None:
    async with paddock(pool_size=3) as world:
        await world.stocked(3)
        claimed = await world.manager.claims.create(CALLER, WANTED)
        await world.stocked(3)
        victim = idle(world)[0]
        for sandbox in (victim, claimed):
            await world.provider.write.mutate(
                Sandbox,
                sandbox.key,
                lambda item: with_meta(item, labels={**item.metadata.labels, LABEL_EVICT: "true"}),
            )
        await world.until(lambda: world.provider.sandbox(victim.key) is None)
        await world.stocked(3)
        assert (
            await world.manager.queries.get(CALLER, sandbox_id(claimed))
        ).status.phase is Phase.RUNNING


async def test_idle_sandboxes_are_replaced_when_they_are_too_old() -> None:
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        first = uids(idle(world))
        await change_pool(world, max_idle_age_seconds=IDLE_SECONDS)
        await asyncio.sleep(IDLE_SECONDS * 5 / 6)
        assert uids(idle(world)) == first
        await world.until(lambda: not uids(idle(world)) & first, seconds=300)
        await world.stocked(2)


async def test_a_template_change_is_rolled_out_gradually_to_idle_sandboxes_only() -> None:
    async with paddock(pool_size=10) as world:
        await world.stocked(10)
        claimed = await world.manager.claims.create(CALLER, WANTED)
        await world.stocked(10)
        before = world.pool().status.revision
        await change_pool(world, update_strategy=UpdateStrategy(max_unavailable=2))
        fewest = len(idle(world))
        await change_template(world, env={"VERSION": "2"})

        def updated() -> bool:
            nonlocal fewest
            found = idle(world)
            fewest = min(fewest, len(found))
            return len(found) == 10 and all(revision_of(item) != before for item in found)

        await world.until(updated, seconds=60)
        assert fewest >= 8
        newest = await world.manager.claims.create(CALLER, WANTED)
        assert newest.spec.template is not None
        assert newest.spec.template.env == {"VERSION": "2"}
        assert (
            await world.manager.queries.get(CALLER, sandbox_id(claimed))
        ).status.phase is Phase.RUNNING


async def test_claims_prefer_the_current_revision_during_an_update() -> None:
    async with paddock(pool_size=4) as world:
        await world.stocked(4)
        await change_pool(world, update_strategy=UpdateStrategy(max_unavailable=1, paused=True))
        await change_template(world, env={"VERSION": "2"})
        await asyncio.sleep(5)
        await change_pool(world, replicas=5)
        await world.stocked(5)
        current = world.pool().status.revision
        assert revision_of(await world.manager.claims.create(CALLER, WANTED)) == current


async def test_deleting_a_pool_never_deletes_claimed_sandboxes() -> None:
    async with paddock(pool_size=3) as world:
        await world.stocked(3)
        claimed = await world.manager.claims.create(CALLER, WANTED)
        await world.provider.write.delete(world.pool())
        await world.until(
            lambda: all(item.spec.claim for item in world.provider.all(Sandbox)), seconds=60
        )
        await asyncio.sleep(60)
        kept = await world.manager.queries.get(CALLER, sandbox_id(claimed))
        assert kept.status.phase is Phase.RUNNING
        assert await world.runtime.inspect(claimed.metadata.uid) is not None


@pytest.mark.parametrize("kind", [RecycleType.RESTART, RecycleType.NOOP])
async def test_a_killed_sandbox_returns_to_a_pool_that_recycles(kind: RecycleType) -> None:
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        # A pool of fixed size: nothing replaces what is missing.
        await change_pool(world, recycle_strategy=RecycleStrategy(type=kind), paused=True)
        wanted = NewSandbox(
            template="base",
            env_vars={"SECRET": "1"},
            metadata={"user": "ada"},
            labels={"team": "a"},
            network=NetworkPolicy(allow_internet_access=False),
        )
        claimed = await world.manager.claims.create(CALLER, wanted)
        created = world.runtime.calls[Operation.CREATE]
        await world.manager.lifecycle.kill(CALLER, sandbox_id(claimed))
        with pytest.raises(NotFoundError):
            await world.manager.queries.get(CALLER, sandbox_id(claimed))
        await world.until(lambda: claimed.metadata.uid in uids(idle(world)))
        back = world.provider.sandbox(claimed.key)
        assert back is not None
        assert back.spec.claim is None
        assert back.spec.network is None
        assert back.spec.shutdown_time is None
        assert back.metadata.labels[LABEL_POOL] == "base"
        assert "team" not in back.metadata.labels
        restarted = kind is RecycleType.RESTART
        assert back.status.recycled_count == int(restarted)
        # Connections belong to one incarnation: those of the last client must not be reused.
        assert back.status.incarnation == claimed.status.incarnation + int(restarted)
        if restarted:
            assert world.runtime.calls[Operation.CREATE] > created


async def test_every_returned_sandbox_is_reset_while_the_band_has_room() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        band = Capacity(buffer_min=1, buffer_max=2, pool_min=0, pool_max=2)
        strategy = RecycleStrategy(type=RecycleType.RESTART, max_recycles=100)
        await change_pool(world, recycle_strategy=strategy, replicas=None, capacity=band)
        seen: set[str] = set()
        for turn in range(20):
            claimed = await world.manager.claims.create(CALLER, WANTED)
            seen.add(claimed.metadata.uid)
            if turn % 3:
                await asyncio.sleep(5)
            await world.manager.lifecycle.kill(CALLER, sandbox_id(claimed))
            await world.until(lambda uid=claimed.metadata.uid: uid in uids(idle(world)))
        assert len(seen) <= 2
        assert sum(item.status.recycled_count for item in idle(world)) == 20
        assert all(
            item.status.incarnation == item.status.recycled_count + 1 for item in idle(world)
        )


async def reported(world: World, reason: str, sandbox: Sandbox) -> str:
    """Return the text of the event about a sandbox; events are written in the background."""
    async with asyncio.timeout(20):
        while True:
            for event in (await world.store.list(Event)).items:
                if event.reason == reason and sandbox.metadata.name in event.message:
                    return event.message
            await asyncio.sleep(0.1)


async def test_a_returned_sandbox_beyond_the_buffer_is_deleted_with_an_event() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        await change_pool(world, recycle_strategy=RecycleStrategy(type=RecycleType.RESTART))
        claimed = await world.manager.claims.create(CALLER, WANTED)
        await world.stocked(1)
        world.runtime.set_latency(Operation.CREATE, 5)
        await world.manager.lifecycle.kill(CALLER, sandbox_id(claimed))
        await world.until(lambda: world.provider.sandbox(claimed.key) is None)
        text = f"sandbox {claimed.metadata.name} is deleted, not reset: 1 too many"
        assert await reported(world, "ResetSkipped", claimed) == text


async def test_a_reset_that_fails_gives_its_place_free_at_once() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        band = Capacity(buffer_min=1, buffer_max=1, pool_min=0, pool_max=1)
        strategy = RecycleStrategy(type=RecycleType.RESTART, timeout_seconds=3600)
        await change_pool(world, recycle_strategy=strategy, replicas=None, capacity=band)
        claimed = await world.manager.claims.create(CALLER, WANTED)
        world.runtime.fail_next(Operation.CREATE, InvalidError("the image is broken"))
        await world.manager.lifecycle.kill(CALLER, sandbox_id(claimed))
        await world.until(lambda: world.provider.sandbox(claimed.key) is None, seconds=30)
        await world.stocked(1)


async def test_a_reset_that_takes_too_long_ends_with_an_event() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        strategy = RecycleStrategy(type=RecycleType.RESTART, timeout_seconds=5)
        await change_pool(world, recycle_strategy=strategy, paused=True)
        claimed = await world.manager.claims.create(CALLER, WANTED)
        world.runtime.set_latency(Operation.CREATE, 60)
        await world.manager.lifecycle.kill(CALLER, sandbox_id(claimed))
        await world.until(lambda: found_deleting(world, claimed), seconds=30)
        text = f"sandbox {claimed.metadata.name} is deleted: not reset within 5 s"
        assert await reported(world, "ResetFailed", claimed) == text


def found_deleting(world: World, sandbox: Sandbox) -> bool:
    found = world.provider.sandbox(sandbox.key)
    return found is None or found.is_deleting


async def test_a_returned_sandbox_is_not_ended_by_a_second_kill() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        strategy = RecycleStrategy(type=RecycleType.RESTART)
        await change_pool(world, recycle_strategy=strategy, paused=True)
        claimed = await world.manager.claims.create(CALLER, WANTED)
        name = sandbox_id(claimed)
        kills = (world.manager.lifecycle.kill(CALLER, name) for _ in range(5))
        results = await asyncio.gather(*kills, return_exceptions=True)
        assert results.count(None) >= 1
        assert all(item is None or isinstance(item, NotFoundError) for item in results)
        await world.until(lambda: claimed.metadata.uid in uids(idle(world)))


async def test_a_sandbox_is_not_claimable_during_its_reset() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        await change_pool(world, recycle_strategy=RecycleStrategy(type=RecycleType.RESTART))
        claimed = await world.manager.claims.create(CALLER, WANTED)
        await world.stocked(1)
        world.runtime.set_latency(Operation.CREATE, 5)
        await world.manager.lifecycle.kill(CALLER, sandbox_id(claimed))
        wishes = (world.manager.claims.create(CALLER, WANTED) for _ in range(3))
        others = await asyncio.gather(*wishes)  # all during its reset
        assert claimed.metadata.uid not in uids(others)


async def test_after_too_many_resets_a_sandbox_is_deleted() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        strategy = RecycleStrategy(type=RecycleType.RESTART, max_recycles=0)
        await change_pool(world, recycle_strategy=strategy)
        claimed = await world.manager.claims.create(CALLER, WANTED)
        await world.manager.lifecycle.kill(CALLER, sandbox_id(claimed))
        await world.until(lambda: world.provider.sandbox(claimed.key) is None)
