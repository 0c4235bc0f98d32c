"""Idle pauses in a whole control plane on virtual time, also where pausing fails."""

import asyncio

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.controllers.idle.controller import RETRY
from paddock.kit.clock import LoopClock
from paddock.kit.errors import UnsupportedError
from paddock.resources.kinds.sandbox import IdlePause, Phase, Sandbox
from paddock.runtime.simulated import ALL_CAPABILITIES, SimulatedRuntime
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

IDLE = NewSandbox(template="base", timeout_seconds=None, idle_pause=IdlePause(after_seconds=30))
NO_PAUSES = structs.replace(
    ALL_CAPABILITIES, can_freeze=False, can_checkpoint=False, can_stop=False
)


def now(world: World, sandbox: Sandbox) -> Sandbox:
    found = world.provider.get(Sandbox, sandbox.key)
    assert found is not None
    return found


async def test_an_idle_sandbox_is_paused() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        idle = await world.manager.claims.create(CALLER, IDLE)
        used = await world.manager.claims.create(CALLER, structs.replace(IDLE, idle_pause=None))
        await asyncio.sleep(60)
        assert now(world, idle).status.phase is Phase.PAUSED
        assert now(world, used).status.phase is Phase.RUNNING


async def test_an_unsupported_pause_is_not_reported_as_retriable() -> None:
    runtime = SimulatedRuntime(clock=(clock := LoopClock()), capabilities=NO_PAUSES)
    async with paddock(pool_size=1, runtime=runtime, clock=clock) as world:
        await world.stocked(1)
        box = await world.manager.claims.create(CALLER, structs.replace(IDLE, idle_pause=None))
        assert box.spec.claim is not None
        with pytest.raises(UnsupportedError, match="could not be paused"):
            await world.manager.lifecycle.pause(CALLER, box.spec.claim.sandbox_id)
        assert now(world, box).status.phase is Phase.RUNNING


async def test_a_failed_pause_is_retried_rarely() -> None:
    runtime = SimulatedRuntime(clock=(clock := LoopClock()), capabilities=NO_PAUSES)
    async with paddock(pool_size=1, runtime=runtime, clock=clock) as world:
        await world.stocked(1)
        idle = await world.manager.claims.create(CALLER, IDLE)
        await asyncio.sleep(60)
        assert "PauseUnsupported" in reasons(world, idle)
        assert not now(world, idle).spec.paused
        before = now(world, idle).metadata.generation
        await asyncio.sleep(RETRY.total_seconds() - 90)
        assert now(world, idle).metadata.generation == before, "nothing is written in vain"
        await asyncio.sleep(150)
        assert now(world, idle).metadata.generation > before, "it is tried again one day"
        assert now(world, idle).status.phase is Phase.RUNNING


def reasons(world: World, sandbox: Sandbox) -> set[str]:
    return {item.reason for item in now(world, sandbox).status.conditions}
