"""Which task each shard runs, and what its result becomes: the pure part, as tables."""

import pytest
from msgspec import structs

from paddock.controllers.batch.tasks import plan
from paddock.controllers.batch.tasks.runner import TaskReport
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.batch import BatchSandbox, BatchSandboxStatus, TaskResult, TaskState
from paddock.resources.meta import ObjectMeta
from tests.controllers.batch.make import batch, task

UID = "0123456789"


def with_results(*results: TaskResult, **spec: object) -> BatchSandbox:
    spec.setdefault("task_template", task("run", max_attempts=2))
    made = batch("b", 4, **spec)
    return structs.replace(
        made,
        metadata=structs.replace(made.metadata, uid=UID),
        status=BatchSandboxStatus(tasks=results),
    )


def result(state: TaskState, attempt: int = 1, reason: str = "", shard: int = 0) -> TaskResult:
    return TaskResult(shard=shard, state=state, attempt=attempt, reason=reason)


def test_a_batch_without_a_task_orders_nothing() -> None:
    assert plan.order_for(with_results(task_template=None), 0) is None


@pytest.mark.parametrize(
    ("found", "attempt"),
    [
        pytest.param((), 1, id="first"),
        pytest.param((result(TaskState.RUNNING, 2),), 2, id="the same attempt goes on"),
        pytest.param((result(TaskState.WAITING, 1, plan.REASON_LOST),), 2, id="after a loss"),
        pytest.param((result(TaskState.SUCCEEDED),), None, id="succeeded"),
        pytest.param((result(TaskState.FAILED),), None, id="failed"),
    ],
)
def test_attempts_count_on_in_another_sandbox(
    found: tuple[TaskResult, ...], attempt: int | None
) -> None:
    order = plan.order_for(with_results(*found), 0)
    assert (order.first_attempt if order else None) == attempt


def test_an_order_names_batch_and_shard_and_own_variables_come_last() -> None:
    spec = with_results(
        task_template=task("run"),
        shard_task_patches=({}, {"process": {"env": [{"name": "PADDOCK_SHARD", "value": "x"}]}}),
    )
    order = plan.order_for(spec, 1)
    assert order is not None
    assert order.name == "b-1-01234567"
    values = [(item.name, item.value) for item in order.spec.process.env]
    assert values[:3] == [
        ("PADDOCK_BATCH", "b"),
        ("PADDOCK_SHARD", "1"),
        ("PADDOCK_REPLICAS", "4"),
    ]
    assert values[3:] == [("PADDOCK_SHARD", "x")]


def test_a_patch_that_cannot_be_merged_is_invalid() -> None:
    with pytest.raises(InvalidError, match=r"shardTaskPatches\[0\]"):
        plan.check(with_results(shard_task_patches=({"process": {"command": 7}},)))


@pytest.mark.parametrize(
    ("found", "state"),
    [
        pytest.param((), None, id="never started"),
        pytest.param((result(TaskState.WAITING),), None, id="still waits"),
        pytest.param((result(TaskState.SUCCEEDED),), None, id="ended before"),
        pytest.param((result(TaskState.RUNNING, 1),), TaskState.WAITING, id="is retried"),
        pytest.param((result(TaskState.RUNNING, 2),), TaskState.FAILED, id="was the last attempt"),
    ],
)
def test_the_state_of_a_task_after_its_sandbox_is_lost(
    found: tuple[TaskResult, ...], state: TaskState | None
) -> None:
    after = plan.after_loss(with_results(*found), 0)
    assert (after.state if after else None) is state
    if after is not None:
        assert after.reason == plan.REASON_LOST


def report(state: TaskState, **more: object) -> TaskReport:
    return structs.replace(TaskReport(name="t", state=state), **more)


def test_reports_replace_results_but_never_an_end() -> None:
    found = with_results(
        result(TaskState.SUCCEEDED, shard=0),
        result(TaskState.RUNNING, shard=1),
        result(TaskState.RUNNING, shard=3),
    )
    reports = {
        0: report(TaskState.RUNNING),
        1: report(TaskState.FAILED),
        2: report(TaskState.FAILED, is_final=True),
        9: report(TaskState.RUNNING),
    }
    after = plan.with_reports(found, reports, frozenset({0, 1, 2}))
    assert [(item.shard, item.state) for item in after] == [
        (0, TaskState.SUCCEEDED),
        (1, TaskState.WAITING),
        (2, TaskState.FAILED),
    ]


@pytest.mark.parametrize(
    ("replicas", "kept"), [(1, plan.OUTPUT_BYTES), (plan.OUTPUT_BUDGET_BYTES // 20, 10)]
)
def test_output_in_the_status_is_bounded(replicas: int, kept: int) -> None:
    found = structs.replace(
        batch("b", replicas, task_template=task("run")), metadata=ObjectMeta(name="b", uid=UID)
    )
    long = "x" * (2 * plan.OUTPUT_BYTES)
    reports = {0: report(TaskState.RUNNING, output_head=long, output_tail=long)}
    (after,) = plan.with_reports(found, reports, frozenset({0}))
    assert len(after.output_head) == len(after.output_tail) == kept
