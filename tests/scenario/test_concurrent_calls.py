"""Concurrent pauses, resumes and kills of one sandbox end as documented."""

import asyncio
import random

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import ConflictError, NotFoundError, PaddockError
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.runtime.port import InstanceState
from paddock.runtime.simulated import Operation, SimulatedRuntime
from tests.scenario.paddock import CALLER, World, paddock
from tests.scenario.test_store_faults import UnreliableStore

pytestmark = pytest.mark.looptime

RESTING = {InstanceState.FROZEN, InstanceState.HIBERNATED, InstanceState.STOPPED}


def slow_runtime() -> SimulatedRuntime:
    slow = dict.fromkeys((Operation.FREEZE, Operation.THAW), 0.5)
    return SimulatedRuntime(clock=LoopClock(), latencies=slow)


async def race(world: World, sandbox_id: str, dice: random.Random, count: int) -> list:
    """Run this many callers that pause or connect within a second, in random order."""

    async def one():
        await asyncio.sleep(dice.random())
        if dice.random() < 0.5:
            return await world.manager.lifecycle.pause(CALLER, sandbox_id)
        return await world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=300)

    return await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)


async def agreed(world: World, sandbox: Sandbox) -> Sandbox:
    """Wait until the sandbox matches its spec, and the runtime agrees."""
    found = sandbox

    async def settled() -> bool:
        nonlocal found
        found = world.provider.sandbox(sandbox.key) or found
        instance = await world.runtime.inspect(found.metadata.uid)
        assert instance is not None
        if found.spec.paused:
            return found.status.phase is Phase.PAUSED and instance.state in RESTING
        return found.status.phase is Phase.RUNNING and instance.state is InstanceState.RUNNING

    async with asyncio.timeout(120):
        while not await settled():
            await asyncio.sleep(0.1)
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("strategy", [PauseStrategy.FREEZE, PauseStrategy.HIBERNATE])
async def test_mixed_pauses_and_resumes_end_in_a_consistent_state(
    seed: int, strategy: PauseStrategy
) -> None:
    dice = random.Random(seed)
    async with paddock(runtime=slow_runtime()) as world:
        sandbox = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=None)
        )
        assert sandbox.spec.claim is not None
        sandbox_id = sandbox.spec.claim.sandbox_id
        if strategy is PauseStrategy.HIBERNATE:
            world.runtime.set_latency(Operation.HIBERNATE, 1.5)
        results = await race(world, sandbox_id, dice, 20)
        for item in results:
            assert isinstance(item, (Sandbox, tuple, ConflictError)), item
        assert any(not isinstance(item, Exception) for item in results)
        await agreed(world, sandbox)
        # Whatever its final state, it can be resumed and then runs.
        woken, _ = await world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=60)
        assert woken.status.phase is Phase.RUNNING


@pytest.mark.parametrize("seed", range(10))
async def test_mixed_pauses_and_resumes_survive_store_faults(seed: int) -> None:
    dice = random.Random(seed)
    store = UnreliableStore(seed)
    async with paddock(store=store, runtime=slow_runtime()) as world:
        sandbox = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=None)
        )
        assert sandbox.spec.claim is not None
        store.is_unreliable = True
        results: list = []
        while not store.faults:
            results += await race(world, sandbox.spec.claim.sandbox_id, dice, 20)
        for item in results:
            assert isinstance(item, (Sandbox, tuple, PaddockError)), item
        store.is_unreliable = False
        await agreed(world, sandbox)


@pytest.mark.parametrize("seed", range(5))
async def test_a_kill_wins_over_pauses_and_resumes_and_leaves_nothing(seed: int) -> None:
    dice = random.Random(seed)
    async with paddock(runtime=slow_runtime()) as world:
        sandbox = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=None)
        )
        assert sandbox.spec.claim is not None
        sandbox_id = sandbox.spec.claim.sandbox_id

        async def kill() -> None:
            await asyncio.sleep(dice.random())
            await world.manager.lifecycle.kill(CALLER, sandbox_id)

        results, _ = await asyncio.gather(race(world, sandbox_id, dice, 10), kill())
        for item in results:
            assert isinstance(item, (Sandbox, tuple, ConflictError, NotFoundError)), item
        await world.until(lambda: world.provider.sandbox(sandbox.key) is None)
        assert await world.runtime.inspect(sandbox.metadata.uid) is None
