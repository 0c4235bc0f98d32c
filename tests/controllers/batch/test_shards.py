"""Which shards a batch wants, misses, loses and releases: the pure part, as tables."""

import pytest
from msgspec import structs

from paddock.controllers.batch import shards
from paddock.resources.kinds.batch import (
    Allocation,
    BatchSandbox,
    BatchSandboxStatus,
    TaskResourcePolicy,
    TaskResult,
    TaskState,
)
from paddock.resources.kinds.sandbox import (
    CONDITION_HEALTHY,
    CONDITION_READY,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.meta import Condition, ConditionStatus, Key, ObjectMeta
from tests.controllers.batch.make import batch, task


def allocated(*indexes: int, empty: tuple[int, ...] = ()) -> tuple[Allocation, ...]:
    return tuple(
        Allocation(shard=i, sandbox="" if i in empty else f"s{i}", uid=f"u{i}") for i in indexes
    )


def with_status(
    replicas: int,
    allocations: tuple[Allocation, ...] = (),
    tasks: tuple[TaskResult, ...] = (),
    **spec: object,
) -> BatchSandbox:
    made = batch("b", replicas, **spec)
    return structs.replace(made, status=BatchSandboxStatus(allocations=allocations, tasks=tasks))


def result(shard: int, state: TaskState, **more: object) -> TaskResult:
    return structs.replace(TaskResult(shard=shard, state=state), **more)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        pytest.param(with_status(3), (0, 1, 2), id="new"),
        pytest.param(with_status(0), (), id="empty"),
        pytest.param(with_status(3, allocated(0, 2)), (0, 1, 2), id="gaps are filled"),
        pytest.param(with_status(2, allocated(4, 7)), (4, 7), id="indexes are stable"),
        pytest.param(with_status(2, allocated(0, 1, 2)), (0, 1), id="highest index goes first"),
        pytest.param(
            with_status(2, allocated(0, 1, 2, empty=(0,))), (1, 2), id="an empty shard goes first"
        ),
        pytest.param(
            with_status(2, allocated(0, 1, 2), annotations={shards.ANNOTATION_VICTIMS: "1, x, 9"}),
            (0, 2),
            id="a named shard goes first",
        ),
        pytest.param(
            with_status(2, allocated(0, 1, 2), (result(1, TaskState.SUCCEEDED),)),
            (0, 2),
            id="a finished shard goes first",
        ),
    ],
)
def test_which_shards_a_batch_wants(found: BatchSandbox, wanted: tuple[int, ...]) -> None:
    assert shards.wanted_shards(found) == wanted


def test_a_shard_that_is_not_ready_is_released_before_ready_ones() -> None:
    found = with_status(2, allocated(0, 1, 2))
    assert shards.wanted_shards(found, frozenset({0})) == (1, 2)


RELEASE = TaskResourcePolicy.RELEASE
DONE = (result(0, TaskState.SUCCEEDED), result(1, TaskState.FAILED), result(2, TaskState.RUNNING))


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        pytest.param(with_status(2), (0, 1), id="all"),
        pytest.param(with_status(3, allocated(0, 1, empty=(1,))), (1, 2), id="empty and new"),
        pytest.param(with_status(2, pause=True), (), id="a paused batch gets nothing"),
        pytest.param(
            with_status(
                4,
                (),
                DONE,
                task_template=task("true"),
                task_resource_policy_when_completed=RELEASE,
            ),
            (2, 3),
            id="released shards need no sandbox",
        ),
    ],
)
def test_which_shards_are_missing(found: BatchSandbox, missing: tuple[int, ...]) -> None:
    assert shards.missing_shards(found) == missing


@pytest.mark.parametrize(
    ("spec", "released"),
    [
        ({"task_template": task("true"), "task_resource_policy_when_completed": RELEASE}, {0, 1}),
        ({"task_resource_policy_when_completed": RELEASE}, set[int]()),
        (
            {
                "task_template": task("true"),
                "task_resource_policy_when_completed": TaskResourcePolicy.RETAIN,
            },
            set[int](),
        ),
    ],
)
def test_shards_are_released_only_by_policy(spec: dict[str, object], released: set[int]) -> None:
    assert shards.released_shards(with_status(3, (), DONE, **spec)) == released


@pytest.mark.parametrize(
    ("found", "is_over"),
    [
        (None, False),
        (result(0, TaskState.RUNNING), False),
        (result(0, TaskState.SUCCEEDED), True),
        (result(0, TaskState.FAILED, attempt=2), False),
        (result(0, TaskState.FAILED, attempt=3), True),
        (result(0, TaskState.FAILED, attempt=1, reason="Stopped"), True),
    ],
)
def test_a_task_is_over_after_its_last_attempt(found: TaskResult | None, is_over: bool) -> None:
    assert shards.is_over(found, 3) is is_over


def sandbox(uid: str = "u0", phase: Phase = Phase.RUNNING, *conditions: Condition) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(name="s0", namespace="default", uid=uid),
        spec=SandboxSpec(),
        status=SandboxStatus(phase=phase, conditions=conditions),
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param(None, "does not exist", id="gone"),
        pytest.param(sandbox("other"), "recreated", id="namesake"),
        pytest.param(sandbox(phase=Phase.FAILED), "Failed", id="failed"),
        pytest.param(sandbox(phase=Phase.SUCCEEDED), "Succeeded", id="ended"),
        pytest.param(sandbox(), "", id="fine"),
    ],
)
def test_loss_gives_the_reason(found: Sandbox | None, words: str) -> None:
    (item,) = allocated(0)
    said = shards.loss(batch("b", 1), item, found)
    assert (words in said) if words else said == ""


READY = Condition(type=CONDITION_READY, status=ConditionStatus.TRUE, reason="Running")
SICK = Condition(type=CONDITION_HEALTHY, status=ConditionStatus.FALSE, reason="ProbeFailed")


@pytest.mark.parametrize(
    ("found", "is_ready"),
    [
        (None, False),
        (sandbox(), False),
        (sandbox("u0", Phase.RUNNING, READY), True),
        (sandbox("u0", Phase.PAUSED, READY), False),
        (sandbox("u0", Phase.RUNNING, READY, SICK), False),
    ],
)
def test_when_a_shard_is_ready(found: Sandbox | None, is_ready: bool) -> None:
    assert shards.is_ready(found) is is_ready


def test_granted_trimmed_and_replaced_keep_the_order_of_shards() -> None:
    found = with_status(3, allocated(2, empty=(2,)))
    after = shards.granted(found, [(1, sandbox(), "id1"), (0, sandbox("u9"), "id0")])
    assert [(item.shard, item.sandbox_id) for item in after] == [(0, "id0"), (1, "id1"), (2, "")]
    assert {item.namespace for item in after} == {""}
    served = structs.replace(found, status=structs.replace(found.status, allocations=after))
    assert [item.shard for item in shards.trimmed(served, (2, 0))] == [0, 2]
    changed = shards.replaced(after, {1: shards.emptied(after[1])})
    assert [item.sandbox for item in changed] == ["s0", "", ""]


def test_a_sandbox_of_another_namespace_is_found_there() -> None:
    item = Allocation(shard=0, sandbox="s", namespace="shared")
    assert shards.sandbox_key(batch("b", 1), item) == Key("shared", "s")
    assert shards.sandbox_key(batch("b", 1), Allocation(shard=0, sandbox="s")).namespace == (
        "default"
    )
