"""Environments in a process that serves claims but runs no controllers."""

import asyncio

import pytest

from paddock.app.wiring.environments import Environments
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import KINDS, Provider
from paddock.kit.errors import RateLimitedError
from paddock.kit.tasks import background
from paddock.manager.environments.ticket import Ticket
from paddock.manager.keys import Keyring
from paddock.resources.kinds.env import ScalingGroup
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key
from tests.controllers.env.make import ENV, environment, found, idle, member, pool
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime


def another(world: World) -> tuple[Provider, Environments]:
    provider = Provider(world.store, kinds=KINDS, clock=world.plane.clock)
    pool_members = PoolMembers()
    provider.informer(Sandbox).subscribe(pool_members.observe)
    keyring = Keyring(world.store, world.plane.clock)
    settings = world.plane.settings
    return provider, Environments(settings, provider, pool_members, keyring, world.plane.clock)


async def test_a_claim_queued_in_another_process_makes_the_pool_grow() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member()}, group=ScalingGroup()))
        await asyncio.sleep(2)
        provider, environments = another(world)
        async with provider.run(), background(environments.follower().run(), name="follower"):
            await asyncio.sleep(1)
            ticket = Ticket(environments.claim_queue, ENV)
            ticket.stays_here = True
            async with asyncio.timeout(5):
                assert await ticket.pool() == Key("default", "agents-one")
            assert len(found(world).status.queues) == 1
            ticket.release_grant()
            await world.until(lambda: not found(world).status.queues)
        made = pool(world, "agents-one")
        assert made is not None
        assert made.status.autoscaling is not None
        assert "1 claim" in made.status.autoscaling.message


async def test_another_process_refuses_claims_when_all_members_are_saturated() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member(0)}))
        await world.provider.write.create(environment({"one": member(1)}, name="other"))
        await idle(world, "other-one", 1)
        await asyncio.sleep(2)
        provider, environments = another(world)
        async with provider.run(), background(environments.follower().run(), name="follower"):
            await asyncio.sleep(1)
            ticket = Ticket(environments.claim_queue, ENV)
            with pytest.raises(RateLimitedError):
                await ticket.pool()
            other = Ticket(environments.claim_queue, Key("default", "other"))
            assert await other.pool() == Key("default", "other-one")
