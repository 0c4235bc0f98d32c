"""What a batch's status says: counters, phase and conditions. Pure but for lookups."""

from collections import Counter
from collections.abc import Mapping

from msgspec import structs

from paddock.cache.checks import PAUSE_REFUSALS, REASON_PAUSE_FAILED
from paddock.cache.provider import Provider
from paddock.controllers.batch import shards
from paddock.kit.clock import Clock
from paddock.resources.batch import (
    BatchPhase,
    BatchSandbox,
    BatchSandboxStatus,
    TaskState,
)
from paddock.resources.meta import Condition, ConditionStatus, condition, set_condition
from paddock.resources.sandbox import CONDITION_PAUSED as SANDBOX_PAUSED
from paddock.resources.sandbox import Phase, Sandbox

CONDITION_READY = "Ready"
CONDITION_PAUSED = "Paused"
CONDITION_PENDING = "PoolAllocationPending"
CONDITION_QUARANTINED = "Quarantined"
CONDITION_ASSIGNED = "PoolAssigned"

Found = Mapping[int, Sandbox | None]
"""The sandbox of each shard that has one."""


def found(batch: BatchSandbox, provider: Provider) -> dict[int, Sandbox | None]:
    """Look up the sandboxes of a batch's shards."""
    return {
        item.shard: provider.sandbox(shards.sandbox_key(batch, item))
        for item in batch.status.allocations
        if item.sandbox
    }


def as_allocated(batch: BatchSandbox, provider: Provider, clock: Clock) -> BatchSandbox:
    """Give a batch whose allocations have just changed, with everything that follows from them."""
    return structs.replace(batch, status=computed(batch, found(batch, provider), clock))


def computed(batch: BatchSandbox, sandboxes: Found, clock: Clock) -> BatchSandboxStatus:
    """Give the status that follows from allocations, sandboxes and task results."""
    old = batch.status
    wanted = shards.wanted_shards(batch)
    released = shards.released_shards(batch)
    ready = sum(1 for sandbox in sandboxes.values() if shards.is_ready(sandbox))
    allocated = sum(1 for item in old.allocations if item.sandbox)
    states = Counter(item.state for item in old.tasks if item.shard in set(wanted))
    waiting = 0
    if batch.spec.task_template is not None:
        waiting = len(wanted) - sum(states.values()) + states[TaskState.WAITING]
    due = len(wanted) - len(released & set(wanted))
    status = structs.replace(
        old,
        observed_generation=batch.metadata.generation,
        replicas=sum(1 for sandbox in sandboxes.values() if sandbox is not None),
        allocated=allocated,
        ready=ready,
        task_waiting=waiting,
        task_running=states[TaskState.RUNNING],
        task_succeeded=states[TaskState.SUCCEEDED],
        task_failed=states[TaskState.FAILED],
        task_unknown=states[TaskState.UNKNOWN],
    )
    refused = _refused(batch, sandboxes)
    status = structs.replace(status, phase=_phase(batch, status, sandboxes, refused, due=due))
    conditions = _conditions(batch, status, clock, due=due)
    if refused:
        conditions = with_condition(
            batch, conditions, CONDITION_PAUSED, holds=False, reason=REASON_PAUSE_FAILED,
            text=_told(refused, len(sandboxes)), clock=clock,
        )  # fmt: skip
    return structs.replace(status, conditions=conditions)


def _refused(batch: BatchSandbox, sandboxes: Found) -> dict[int, str]:
    """Find shards that should be paused and could not be: they run on, and say why."""
    if not batch.spec.pause:
        return {}
    found: dict[int, str] = {}
    for shard, sandbox in sandboxes.items():
        if sandbox is None or sandbox.spec.paused:
            continue
        told = condition(sandbox.status.conditions, SANDBOX_PAUSED)
        if told is not None and told.reason in PAUSE_REFUSALS:
            found[shard] = told.message
    return found


def _told(refused: Mapping[int, str], count: int) -> str:
    shard, why = min(refused.items())
    return f"{len(refused)} of {count} shards could not be paused; shard {shard}: {why}"


def _phase(
    batch: BatchSandbox,
    status: BatchSandboxStatus,
    sandboxes: Found,
    refused: Mapping[int, str],
    *,
    due: int,
) -> BatchPhase:
    phases = {sandbox.status.phase for sandbox in sandboxes.values() if sandbox is not None}
    # Where nothing can be paused, the batch runs on as its shards do; a condition says why.
    if batch.spec.pause and len(refused) < max(len(sandboxes), 1):
        return BatchPhase.PAUSED if phases <= {Phase.PAUSED} else BatchPhase.PAUSING
    if phases & {Phase.PAUSED, Phase.RESUMING, Phase.PAUSING}:
        return BatchPhase.RESUMING
    if batch.spec.task_template is not None and batch.spec.replicas:
        ended = status.task_succeeded + status.task_failed
        if ended >= batch.spec.replicas:
            return BatchPhase.FAILED if status.task_failed else BatchPhase.COMPLETED
    return BatchPhase.RUNNING if status.ready >= due else BatchPhase.PENDING


def _conditions(
    batch: BatchSandbox, status: BatchSandboxStatus, clock: Clock, *, due: int
) -> tuple[Condition, ...]:
    now = clock.now()
    over = status.phase in (BatchPhase.COMPLETED, BatchPhase.FAILED)
    paused = status.phase is BatchPhase.PAUSED
    is_ready = status.ready >= due and not batch.spec.pause
    text = f"{status.ready} of {due} are ready"
    reason = "AllReady" if is_ready else ("Paused" if batch.spec.pause else "NotReady")
    conditions = with_condition(
        batch, status.conditions, CONDITION_READY, holds=is_ready, reason=reason, text=text,
        clock=clock,
    )  # fmt: skip
    if paused or any(item.type == CONDITION_PAUSED for item in conditions):
        conditions = with_condition(
            batch, conditions, CONDITION_PAUSED, holds=paused, reason=str(status.phase),
            clock=clock,
        )  # fmt: skip
    short = due - status.allocated
    pending = batch.spec.pool_ref != "" and short > 0 and not over and not batch.spec.pause
    if pending or any(item.type == CONDITION_PENDING for item in conditions):
        new = Condition(
            type=CONDITION_PENDING,
            status=ConditionStatus.TRUE if pending else ConditionStatus.FALSE,
            reason="WaitingForSandboxes" if pending else "Allocated",
            message=f"{short} shards wait for a sandbox" if pending else "",
            observed_generation=batch.metadata.generation,
        )
        conditions = set_condition(conditions, new, now=now)
    return conditions


def with_condition(
    batch: BatchSandbox,
    conditions: tuple[Condition, ...],
    kind: str,
    *,
    holds: bool,
    reason: str,
    clock: Clock,
    text: str = "",
) -> tuple[Condition, ...]:
    """Give conditions with one set."""
    new = Condition(
        type=kind,
        status=ConditionStatus.TRUE if holds else ConditionStatus.FALSE,
        reason=reason,
        message=text,
        observed_generation=batch.metadata.generation,
    )
    return set_condition(conditions, new, now=clock.now())
