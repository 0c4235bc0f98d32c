"""Pools without an owner get an environment, if the operator enables it."""

import asyncio

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import Key, ObjectMeta, controller_of, is_true, with_meta
from tests.controllers.env.make import environment, found, idle, member, pool
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime
ORPHAN = Key("default", "orphan")


def orphan(**spec) -> SandboxPool:
    spec.setdefault("template_ref", TemplateRef(name="base"))
    return SandboxPool(
        metadata=ObjectMeta(name="orphan", namespace="default", labels={"kept": "yes"}),
        spec=SandboxPoolSpec(**spec),
    )


def owned(world: World) -> bool:
    made = pool(world, "orphan")
    owner = controller_of(made) if made is not None else None
    env = world.provider.get(SandboxEnv, ORPHAN)
    return owner is not None and env is not None and owner.uid == env.metadata.uid


async def test_an_orphan_is_adopted_and_its_sandboxes_do_not_change() -> None:
    async with paddock(pool_size=0, adopt_pools=True) as world:
        await world.provider.write.create(orphan(replicas=3))
        await world.until(lambda: owned(world))
        await idle(world, "orphan", 3)
        before = set(world.plane.pool_members.members(ORPHAN).available)
        await asyncio.sleep(60)
        assert set(world.plane.pool_members.members(ORPHAN).available) == before
        made = pool(world, "orphan")
        assert made is not None
        assert made.metadata.labels["kept"] == "yes"
        assert is_true(found(world, ORPHAN).status.conditions, "Ready")
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="orphan"))
        assert sandbox.key in before


async def test_a_pool_with_its_own_template_and_capacity_is_adopted_unchanged() -> None:
    async with paddock(pool_size=0, adopt_pools=True) as world:
        band = Capacity(buffer_min=1, buffer_max=2, pool_min=2, pool_max=5)
        wanted = orphan(template_ref=None, template=SandboxTemplateSpec(image="x"), capacity=band)
        await world.provider.write.create(wanted)
        await world.until(lambda: owned(world))
        await idle(world, "orphan", 2)
        await asyncio.sleep(15)
        env = found(world, ORPHAN)
        assert is_true(env.status.conditions, "TemplateConsistent")
        assert env.spec.clusters["local"].members["orphan"].config.max_replicas == 5


async def test_nothing_is_adopted_unless_it_is_enabled() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(orphan(replicas=1))
        await asyncio.sleep(30)
        assert world.provider.get(SandboxEnv, ORPHAN) is None


async def test_members_of_other_environments_are_left_alone() -> None:
    async with paddock(pool_size=0, adopt_pools=True) as world:
        await world.provider.write.create(environment({"one": member(1)}))
        await idle(world, "agents-one", 1)
        await asyncio.sleep(30)
        assert world.provider.get(SandboxEnv, Key("default", "agents-one")) is None


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_restart_between_any_two_steps_is_harmless(step: int) -> None:
    async with paddock(pool_size=0, adopt_pools=True) as world:
        await world.provider.write.create(orphan(replicas=2))
        await world.until(lambda: owned(world))
        await asyncio.sleep(20)
        whole = found(world, ORPHAN)
        store = world.store
    # As if the control plane had been killed after this step.
    if step < 3:
        current = await store.get(SandboxPool, ORPHAN)
        await store.update(with_meta(current, owner_references=()))
    if step < 2:
        current = await store.get(SandboxEnv, ORPHAN)
        await store.update(
            structs.replace(current, spec=structs.replace(current.spec, clusters={}))
        )
    async with paddock(pool_size=0, adopt_pools=True, store=store) as world:
        await world.until(lambda: owned(world))
        await asyncio.sleep(20)
        env = found(world, ORPHAN)
        assert env.metadata.uid == whole.metadata.uid
        assert set(env.spec.clusters["local"].members) == {"orphan"}
        await idle(world, "orphan", 2)
