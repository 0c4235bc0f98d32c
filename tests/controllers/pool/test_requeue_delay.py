"""How soon a pool is reconciled again, measured on virtual time."""

import asyncio

import pytest

from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.meta import Key
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime

WANTED = NewSandbox(template="base")
BASE = Key("default", "base")


async def test_a_pool_is_reconciled_rarely_during_claims_and_at_once_when_empty() -> None:
    async with paddock(pool_size=20) as world:
        await world.stocked(20)
        await asyncio.sleep(5)
        written: list[SandboxPool] = []
        world.provider.informer(SandboxPool).subscribe(lambda old, new: written.append(new))
        for _ in range(9):
            await world.manager.claims.create(CALLER, WANTED)
            await asyncio.sleep(0.1)
        assert 1 <= len(written) <= 4

        for _ in range(11):
            await world.manager.claims.create(CALLER, WANTED)
        await world.until(lambda: world.plane.pool_members.members(BASE).creating, seconds=0.25)


async def test_a_steady_stream_of_claims_never_finds_a_pool_empty() -> None:
    async with paddock(pool_size=20) as world:
        await world.stocked(20)
        await asyncio.sleep(5)
        for _ in range(100):
            await world.manager.claims.create(CALLER, WANTED)
            await asyncio.sleep(0.1)
            assert world.plane.pool_members.members(BASE).available
