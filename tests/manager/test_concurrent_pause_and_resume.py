"""Pause and resume of one sandbox by concurrent requests."""

import asyncio

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import ConflictError
from paddock.resources.kinds.sandbox import Phase
from paddock.runtime.simulated import Operation, SimulatedRuntime
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime


def slow_runtime() -> SimulatedRuntime:
    slow = dict.fromkeys((Operation.FREEZE, Operation.THAW), 0.5)
    return SimulatedRuntime(clock=LoopClock(), latencies=slow)


async def a_sandbox(world: World) -> str:
    made = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
    assert made.spec.claim is not None
    return made.spec.claim.sandbox_id


async def test_every_connect_during_a_pause_resumes_the_sandbox() -> None:
    async with paddock(runtime=slow_runtime()) as world:
        sandbox_id = await a_sandbox(world)
        pauses = [
            asyncio.create_task(world.manager.lifecycle.pause(CALLER, sandbox_id)) for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        found = await asyncio.gather(
            *(
                world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=60)
                for _ in range(10)
            ),
            world.manager.lifecycle.wake(await world.manager.queries.get(CALLER, sandbox_id)),
        )
        assert all(is_resumed for _, is_resumed in found[:-1])
        assert {pause.status.phase for pause in await asyncio.gather(*pauses)} == {Phase.PAUSED}
        assert (await world.manager.queries.get(CALLER, sandbox_id)).status.phase is Phase.RUNNING


async def test_a_pause_during_a_resume_is_a_conflict() -> None:
    async with paddock(runtime=slow_runtime()) as world:
        sandbox_id = await a_sandbox(world)
        await world.manager.lifecycle.pause(CALLER, sandbox_id)
        resume = asyncio.create_task(
            world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=60)
        )
        await asyncio.sleep(0.1)
        with pytest.raises(ConflictError):
            await world.manager.lifecycle.pause(CALLER, sandbox_id)
        await resume
        assert (await world.manager.queries.get(CALLER, sandbox_id)).status.phase is Phase.RUNNING
