"""Controls of the simulated driver: latency, scripted failures, lost replies, scale."""

import asyncio

import pytest

from paddock.kit.errors import ConflictError, UnavailableError, UnsupportedError
from paddock.runtime.port import Blueprint, Capabilities, InstanceState
from paddock.runtime.simulated import Operation, SimulatedRuntime


def blueprint(uid: str) -> Blueprint:
    return Blueprint(uid=uid)


@pytest.mark.looptime
async def test_operations_take_their_latency_on_the_loops_clock(looptime):
    runtime = SimulatedRuntime(latencies={Operation.CREATE: 2.0, Operation.HIBERNATE: 3.0})
    await runtime.create(blueprint("a"))
    await runtime.hibernate("a")
    assert looptime == 5


async def test_a_scripted_failure_happens_once_and_leaves_nothing():
    runtime = SimulatedRuntime()
    runtime.fail_next(Operation.CREATE)
    with pytest.raises(UnavailableError):
        await runtime.create(blueprint("a"))
    assert await runtime.inspect("a") is None
    assert (await runtime.create(blueprint("a"))).state is InstanceState.RUNNING


async def test_a_lost_reply_leaves_the_work_done():
    runtime = SimulatedRuntime()
    await runtime.create(blueprint("a"))
    runtime.lose_reply_next(Operation.FREEZE, uid="a")
    with pytest.raises(UnavailableError):
        await runtime.freeze("a")
    assert (await runtime.inspect("a")).state is InstanceState.FROZEN


async def test_a_node_that_is_down_refuses_calls_and_reports_its_sandboxes_when_it_is_back():
    runtime = SimulatedRuntime()
    await runtime.create(blueprint("a"))
    events = runtime.watch()
    seen = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    runtime.fail_node(is_down=True)
    with pytest.raises(UnavailableError):
        await runtime.freeze("a")
    runtime.fail_node(is_down=False)
    assert (await seen).state is InstanceState.RUNNING
    await events.aclose()


async def test_forks_and_checkpoints_copy_files():
    runtime = SimulatedRuntime()
    await runtime.create(blueprint("a"))
    runtime.files("a")["/x"] = "1"
    await runtime.snapshot("a", "cp", memory=False, keep_running=True)
    runtime.files("a")["/x"] = "2"
    await runtime.fork("a", (blueprint("kid"),))
    await runtime.create(Blueprint(uid="old", checkpoint_id="cp"))
    assert runtime.files("kid")["/x"] == "2"
    assert runtime.files("old")["/x"] == "1"


async def test_one_failed_fork_does_not_affect_the_others():
    runtime = SimulatedRuntime()
    await runtime.create(blueprint("a"))
    runtime.fail_next(Operation.CREATE, uid="k1")
    first, second = await runtime.fork("a", (blueprint("k1"), blueprint("k2")))
    assert isinstance(first, str)
    assert second.state is InstanceState.RUNNING


async def test_missing_capabilities_are_refused_with_their_reason():
    none = Capabilities(reasons={"can_freeze": "no groups here"})
    runtime = SimulatedRuntime(capabilities=none)
    await runtime.create(blueprint("a"))
    with pytest.raises(UnsupportedError, match="no groups here"):
        await runtime.freeze("a")


async def test_random_failures_are_reproducible_by_seed():
    async def outcomes() -> list[bool]:
        runtime = SimulatedRuntime(failure_rate=0.3, seed=5)
        made = []
        for number in range(50):
            try:
                await runtime.create(blueprint(str(number)))
                made.append(True)
            except UnavailableError:
                made.append(False)
        return made

    first = await outcomes()
    assert first == await outcomes()
    assert 5 < first.count(False) < 30


async def test_operations_on_one_sandbox_wait_for_each_other():
    runtime = SimulatedRuntime(latencies={Operation.CREATE: 0.01, Operation.DESTROY: 0.0})
    made, _ = await asyncio.gather(runtime.create(blueprint("a")), runtime.destroy("a"))
    assert made.state is InstanceState.RUNNING
    assert await runtime.inspect("a") is None
    await runtime.create(blueprint("b"))
    await runtime.stop("b")
    with pytest.raises(ConflictError):
        await runtime.freeze("b")


async def test_tens_of_thousands_of_sandboxes_are_cheap():
    runtime = SimulatedRuntime(latencies=dict.fromkeys(Operation, 0.0))
    for number in range(20_000):
        await runtime.create(blueprint(str(number)))
    assert len(await runtime.instances()) == 20_000
    assert runtime.calls[Operation.CREATE] == 20_000
