"""Decides which task each shard runs, and its status. Pure."""

from collections.abc import Mapping

from msgspec import structs

from paddock.controllers.batch.shards import OVER, results
from paddock.controllers.batch.tasks.runner import TaskOrder, TaskReport
from paddock.resources.kinds.batch import (
    BatchSandbox,
    EnvVar,
    TaskResult,
    TaskSpec,
    TaskState,
    TaskTemplate,
)
from paddock.resources.strategic_merge import merged

OUTPUT_BYTES = 2048
"""Maximum output in the status at either end, per task."""
OUTPUT_BUDGET_BYTES = 256 << 10
"""Maximum output in the status of one batch."""
REASON_LOST = "ShardLost"


def task_name(batch: BatchSandbox, shard: int) -> str:
    """Return the name of a shard's task; it contains the batch's uid."""
    return f"{batch.metadata.name}-{shard}-{batch.metadata.uid[:8]}"


def task_of(batch: BatchSandbox, shard: int) -> TaskSpec | None:
    """Return the task of one shard. `InvalidError` if its patch cannot be merged."""
    template = batch.spec.task_template
    if template is None:
        return None
    patches = batch.spec.shard_task_patches
    if shard >= len(patches) or not patches[shard]:
        return template.spec
    patch = patches[shard]
    where = f"spec.shardTaskPatches[{shard}]"
    if "spec" in patch:
        return merged(template, patch, where=where).spec
    return merged(TaskTemplate(spec=template.spec), {"spec": patch}, where=where).spec


def check(batch: BatchSandbox) -> None:
    """Raise `InvalidError` if a task patch cannot be merged."""
    for shard, patch in enumerate(batch.spec.shard_task_patches):
        if patch:
            task_of(batch, shard)


def order_for(batch: BatchSandbox, shard: int) -> TaskOrder | None:
    """Return the task that a shard's sandbox should run; `None` if it has ended."""
    result = results(batch).get(shard)
    if result is not None and result.state in OVER:
        return None
    spec = task_of(batch, shard)
    if spec is None:
        return None
    attempt = 1
    if result is not None and result.reason == REASON_LOST:
        attempt = result.attempt + 1
    elif result is not None:
        attempt = result.attempt
    known = _with_shard_env(spec, batch, shard)
    return TaskOrder(name=task_name(batch, shard), spec=known, first_attempt=attempt)


def _with_shard_env(spec: TaskSpec, batch: BatchSandbox, shard: int) -> TaskSpec:
    """Add the shard's variables to the environment; the task's own variables win."""
    values = {
        "PADDOCK_BATCH": batch.metadata.name,
        "PADDOCK_SHARD": str(shard),
        "PADDOCK_REPLICAS": str(batch.spec.replicas),
    }
    env = (*(EnvVar(name=name, value=value) for name, value in values.items()), *spec.process.env)
    return structs.replace(spec, process=structs.replace(spec.process, env=env))


def after_loss(batch: BatchSandbox, shard: int) -> TaskResult | None:
    """Return the task result of a shard that lost its sandbox; `None` if unchanged."""
    result = results(batch).get(shard)
    spec = task_of(batch, shard)
    if spec is None or result is None or result.state in OVER:
        return None
    if result.state is TaskState.WAITING and result.started_at is None:
        return None
    if result.attempt < spec.max_attempts:
        return structs.replace(
            result,
            state=TaskState.WAITING,
            reason=REASON_LOST,
            message="its sandbox was lost; the task is retried in another",
        )
    return structs.replace(
        result,
        state=TaskState.FAILED,
        reason=REASON_LOST,
        message=f"its sandbox was lost in attempt {result.attempt} of {spec.max_attempts}",
    )


def with_reports(
    batch: BatchSandbox, reports: Mapping[int, TaskReport], wanted: frozenset[int]
) -> tuple[TaskResult, ...]:
    """Return task results with new reports merged; ended tasks do not change."""
    known = {shard: item for shard, item in results(batch).items() if shard in wanted}
    budget = min(OUTPUT_BYTES, OUTPUT_BUDGET_BYTES // max(2 * batch.spec.replicas, 1))
    for shard, report in reports.items():
        old = known.get(shard)
        if shard in wanted and (old is None or old.state not in OVER):
            known[shard] = _result(shard, report, budget)
    return tuple(known[shard] for shard in sorted(known))


def _result(shard: int, report: TaskReport, budget: int) -> TaskResult:
    state = report.state
    if state is TaskState.FAILED and not report.is_final:
        # It will be retried.
        state = TaskState.WAITING
    tail = report.output_tail[-budget:] if budget else ""
    return TaskResult(
        shard=shard,
        state=state,
        attempt=report.attempt,
        exit_code=report.exit_code,
        reason=report.reason,
        message=report.message[:512],
        started_at=report.started_at,
        finished_at=report.finished_at,
        output_head=report.output_head[:budget],
        output_tail=tail,
    )
