"""The status of a batch: reasons for waiting, problems, and the state of its shards."""

import pytest

from paddock.cli.batch.progress import blocking_reason
from paddock.kit.errors import InvalidError
from paddock.resources import codec
from paddock.resources.kinds.batch import BatchPhase, TaskResourcePolicy
from paddock.resources.meta import condition
from tests.controllers.batch.make import Batches, batch, batching, pool, task
from tests.scenario.paddock import CALLER

pytestmark = pytest.mark.looptime


def _problem_shown(batches: Batches, name: str) -> str:
    return blocking_reason(codec.to_builtins(batches.get(name)).get("status") or {})


async def test_a_batch_that_can_never_be_scheduled_reports_why() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=2))
        await batches.create(
            batch("lost", 1, pool_ref="nowhere"),
            batch("gang", 3, pool_ref="p", min_available=3),
            batch("greedy", 3, pool_ref="p"),
        )
        await world.until(lambda: "'nowhere'" in _problem_shown(batches, "lost"))
        await world.until(lambda: "3 are wanted at once" in _problem_shown(batches, "gang"))
        await batches.ready("greedy", 2)
        await world.until(lambda: "may have 2 in all" in _problem_shown(batches, "greedy"))


async def test_a_batch_that_only_waits_reports_no_problem() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=2))
        release = TaskResourcePolicy.RELEASE
        wanted = batch(
            "b", 5, pool_ref="p", task_template=task("sleep", "9"),
            task_resource_policy_when_completed=release,
        )  # fmt: skip
        await batches.create(wanted)
        await batches.ready("b", 2)
        assert _problem_shown(batches, "b") == ""
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.COMPLETED, seconds=60)


async def test_a_patch_with_an_unknown_field_is_rejected() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=2))
        patches = ({}, {"proces": {"command": ["exit", "7"]}})
        wanted = batch("b", 2, pool_ref="p", task_template=task("true"), shard_task_patches=patches)
        await batches.create(wanted)
        await world.until(lambda: "proces" in batches.get("b").status.message)
        assert batches.get("b").status.allocations == ()
        with pytest.raises(InvalidError, match="proces"):
            _problem_shown(batches, "b")


async def test_shards_paused_one_by_one_are_not_reported_as_resuming() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=2))
        await batches.create(batch("b", 2, pool_ref="p"))
        await batches.ready("b")

        def text() -> str:
            told = condition(batches.get("b").status.conditions, "Ready")
            return told.message if told is not None else ""

        first, second = batches.get("b").status.allocations
        assert await world.manager.batches.materialize_claim(first.sandbox_id, CALLER)
        await world.manager.lifecycle.pause(CALLER, first.sandbox_id)
        await world.until(lambda: text() == "1 of 2 are ready, 1 are paused")
        assert batches.get("b").status.phase is BatchPhase.PENDING
        assert await world.manager.batches.materialize_claim(second.sandbox_id, CALLER)
        await world.manager.lifecycle.pause(CALLER, second.sandbox_id)
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.PAUSED)
        await batches.change("b", pause=False)
        await batches.ready("b")
        assert batches.get("b").status.phase is BatchPhase.RUNNING
