"""Tasks of batches: one per shard, pushed results, retries, loss, release, restart."""

import asyncio

import pytest

from paddock.controllers.batch.tasks.runner import TaskReport
from paddock.kit.clock import LoopClock
from paddock.resources.kinds.batch import BatchPhase, TaskResourcePolicy, TaskState
from paddock.resources.kinds.pool import RecycleStrategy, RecycleType
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.controllers.batch.make import Batches, batch, batching, pool, task
from tests.scenario.paddock import paddock

pytestmark = pytest.mark.looptime


def runner_of(world):
    return world.plane.batches.task_watcher._runner


async def over(world, batches: Batches, name: str, seconds: float = 60) -> None:
    ends = (BatchPhase.COMPLETED, BatchPhase.FAILED)
    await world.until(lambda: batches.get(name).status.phase in ends, seconds=seconds)


async def test_every_shard_runs_its_task_once_and_all_succeed() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=4, most=20))
        await batches.create(batch("b", 6, pool_ref="p", task_template=task("true")))
        await over(world, batches, "b")
        status = batches.get("b").status
        assert (status.phase, status.task_succeeded, status.task_failed) == (
            BatchPhase.COMPLETED,
            6,
            0,
        )
        assert sorted(runner_of(world).runs.values()) == [1] * 6
        assert [item.exit_code for item in status.tasks] == [0] * 6
        await batches.delete("b")
        await world.until(lambda: batches.allocated("p") == 0)


async def test_a_shards_patch_changes_its_task_alone() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=20))
        patches = ({}, {"spec": {"process": {"command": ["exit", "7"]}}})
        wanted = batch("b", 3, pool_ref="p", task_template=task("true"), shard_task_patches=patches)
        await batches.create(wanted)
        await over(world, batches, "b")
        status = batches.get("b").status
        assert status.phase is BatchPhase.FAILED
        assert [item.exit_code for item in status.tasks] == [0, 7, 0]
        assert [item.state for item in status.tasks] == [
            TaskState.SUCCEEDED,
            TaskState.FAILED,
            TaskState.SUCCEEDED,
        ]


async def test_a_task_is_retried_with_backoff_up_to_its_limit() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=20))
        await batches.create(
            batch("works", 1, pool_ref="p", task_template=task("fail-until", "3", max_attempts=4)),
            batch("never", 1, pool_ref="p", task_template=task("false", max_attempts=3)),
        )
        await over(world, batches, "works")
        await over(world, batches, "never")
        (good,), (bad,) = batches.get("works").status.tasks, batches.get("never").status.tasks
        assert (good.state, good.attempt) == (TaskState.SUCCEEDED, 3)
        assert (bad.state, bad.attempt) == (TaskState.FAILED, 3)


async def test_a_timeout_ends_a_task_and_is_its_reason() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=20))
        template = task("sleep", "100", timeout_seconds=5)
        await batches.create(batch("b", 1, pool_ref="p", task_template=template))
        await over(world, batches, "b")
        assert batches.get("b").status.tasks[0].reason == "TaskTimeout"


async def test_with_release_a_shard_releases_its_sandbox_when_its_task_ends() -> None:
    async with batching() as (world, batches):
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await batches.create(pool("p", buffer=0, most=2, recycle_strategy=strategy))
        wanted = batch(
            "b",
            6,
            pool_ref="p",
            task_template=task("sleep", "2"),
            task_resource_policy_when_completed=TaskResourcePolicy.RELEASE,
        )
        await batches.create(wanted)
        await over(world, batches, "b", seconds=120)
        await world.until(lambda: batches.held("b") == {})
        status = batches.get("b").status
        assert (status.task_succeeded, status.allocated) == (6, 0)
        assert len(status.released) == 6
        assert sorted(runner_of(world).runs.values()) == [1] * 6
        assert batches.allocated("p") == 0


async def test_a_task_of_a_lost_shard_is_retried_in_another_sandbox() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=20))
        await batches.create(
            batch("may", 1, pool_ref="p", task_template=task("sleep", "20", max_attempts=2)),
            batch("once", 1, pool_ref="p", task_template=task("sleep", "20")),
        )
        for name in ("may", "once"):
            await world.until(lambda name=name: batches.get(name).status.task_running == 1)
            world.runtime.crash(batches.held(name)[0])
        await over(world, batches, "may", seconds=120)
        await over(world, batches, "once", seconds=120)
        (again,), (lost,) = batches.get("may").status.tasks, batches.get("once").status.tasks
        assert (again.state, again.attempt) == (TaskState.SUCCEEDED, 2)
        assert (lost.state, lost.reason) == (TaskState.FAILED, "ShardLost")


async def test_after_a_restart_tasks_continue_and_none_runs_twice() -> None:
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock)
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=0, most=20))
        await batches.create(batch("b", 5, pool_ref="p", task_template=task("sleep", "30")))
        await world.until(lambda: batches.get("b").status.task_running == 5)
        runner = runner_of(world)
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        # Tasks in sandboxes continue while the control plane is down.
        world.plane.batches.task_watcher._runner = runner
        batches = Batches(world)
        await over(world, batches, "b")
        assert batches.get("b").status.task_succeeded == 5
        assert sorted(runner.runs.values()) == [1] * 5


async def test_a_task_is_unknown_while_its_sandbox_does_not_respond() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=1, most=20))
        await world.stocked(1, "p")
        (key,) = world.plane.pool_members.members(Key("default", "p")).available
        sandbox = world.provider.sandbox(key)
        assert sandbox is not None
        runner_of(world).unreachable.add(sandbox.metadata.uid)
        await batches.create(batch("b", 1, pool_ref="p", task_template=task("true")))
        await world.until(lambda: batches.get("b").status.task_unknown == 1, seconds=120)
        assert batches.get("b").status.tasks[0].reason == "Unreachable"
        runner_of(world).unreachable.clear()
        await over(world, batches, "b")
        assert batches.get("b").status.phase is BatchPhase.COMPLETED


async def test_deleting_a_batch_stops_its_tasks_first() -> None:
    async with batching() as (world, batches):
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await batches.create(pool("p", buffer=0, most=2, recycle_strategy=strategy))
        await batches.create(batch("b", 2, pool_ref="p", task_template=task("sleep", "1000")))
        await world.until(lambda: batches.get("b").status.task_running == 2)
        await batches.delete("b")
        runner = runner_of(world)
        assert not runner._running
        assert not any(runner._reports.values())


async def test_a_paused_batch_is_deleted_without_waiting_for_its_tasks() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=2))
        await batches.create(batch("b", 2, pool_ref="p", task_template=task("sleep", "1000")))
        await world.until(lambda: batches.get("b").status.task_running == 2)
        await batches.change("b", pause=True)
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.PAUSED)

        async def hang(*_: object) -> tuple[TaskReport, ...]:
            await asyncio.sleep(1000)
            return ()

        runner_of(world).assign = hang
        await batches.write.delete(batches.get("b"))
        await world.until(lambda: batches.is_gone("b"), seconds=5)
        await world.until(lambda: not world.provider.all(Sandbox), seconds=5)


async def test_a_thousand_tasks_cost_few_writes() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=300, most=300))
        await world.until(
            lambda: len(world.plane.pool_members.members(Key("default", "p")).available) == 300,
            seconds=300,
        )
        await asyncio.sleep(5)
        before = int(world.pool("p").metadata.resource_version)
        await batches.create(batch("b", 300, pool_ref="p", task_template=task("true")))
        await over(world, batches, "b")
        after = int(batches.get("b").metadata.resource_version)
        assert after - before < 20
