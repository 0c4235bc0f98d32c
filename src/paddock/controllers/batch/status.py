"""The status of a batch: counters, phase and conditions. Pure except for cache lookups."""

from collections import Counter
from collections.abc import Mapping

from msgspec import structs

from paddock.cache.checks import PAUSE_REFUSALS, REASON_PAUSE_FAILED
from paddock.cache.provider import Provider
from paddock.controllers.batch import shards
from paddock.kit.clock import Clock
from paddock.resources.kinds.batch import (
    BatchPhase,
    BatchSandbox,
    BatchSandboxStatus,
    TaskResourcePolicy,
    TaskState,
)
from paddock.resources.kinds.sandbox import CONDITION_PAUSED as SANDBOX_PAUSED
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.meta import Condition, ConditionStatus, condition, set_condition

CONDITION_READY = "Ready"
CONDITION_PAUSED = "Paused"
CONDITION_PENDING = "PoolAllocationPending"
CONDITION_QUARANTINED = "Quarantined"
CONDITION_ASSIGNED = "PoolAssigned"
REASON_UNSATISFIABLE = "Unsatisfiable"
"""The batch needs more sandboxes at once than its pool can ever have."""
REASON_TOO_SMALL = "PoolTooSmall"
"""The batch needs more sandboxes than its pool may have; it keeps what it gets."""

Found = Mapping[int, Sandbox | None]
"""The sandbox of each allocated shard."""


def found(batch: BatchSandbox, provider: Provider) -> dict[int, Sandbox | None]:
    """Return the sandboxes of a batch's shards from the cache."""
    return {
        item.shard: provider.sandbox(shards.sandbox_key(batch, item))
        for item in batch.status.allocations
        if item.sandbox
    }


def as_allocated(
    batch: BatchSandbox, provider: Provider, clock: Clock, *, max_size: int | None
) -> BatchSandbox:
    """Return a batch with the status that follows from its changed allocations."""
    return structs.replace(
        batch, status=computed(batch, found(batch, provider), clock, max_size=max_size)
    )


def computed(
    batch: BatchSandbox, sandboxes: Found, clock: Clock, *, max_size: int | None = None
) -> BatchSandboxStatus:
    """Return the status that follows from allocations, sandboxes and task results.

    `max_size`: the maximum size of the batch's pool; `None` means unlimited.
    """
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
    paused_shards = sum(1 for item in sandboxes.values() if item is not None and item.spec.paused)
    conditions = _conditions(
        batch, status, clock, due=due, paused_shards=paused_shards, max_size=max_size
    )
    if refused:
        conditions = with_condition(
            batch, conditions, CONDITION_PAUSED, holds=False, reason=REASON_PAUSE_FAILED,
            text=_pause_error(refused, len(sandboxes)), clock=clock,
        )  # fmt: skip
    return structs.replace(status, conditions=conditions)


def _refused(batch: BatchSandbox, sandboxes: Found) -> dict[int, str]:
    """Return the shards that could not be paused, with the reason."""
    if not batch.spec.pause:
        return {}
    found: dict[int, str] = {}
    for shard, sandbox in sandboxes.items():
        if sandbox is None or sandbox.spec.paused:
            continue
        refusal = condition(sandbox.status.conditions, SANDBOX_PAUSED)
        if refusal is not None and refusal.reason in PAUSE_REFUSALS:
            found[shard] = refusal.message
    return found


def _pause_error(refused: Mapping[int, str], count: int) -> str:
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
    # If no shard can be paused, the batch runs on; a condition gives the reason.
    if batch.spec.pause and len(refused) < max(len(sandboxes), 1):
        return BatchPhase.PAUSED if phases <= {Phase.PAUSED} else BatchPhase.PAUSING
    # Shards that were paused one by one do not resume by themselves.
    wanted = {item.spec.paused for item in sandboxes.values() if item is not None}
    if wanted == {True} and phases <= {Phase.PAUSED}:
        return BatchPhase.PAUSED
    if any(
        item.status.phase in (Phase.PAUSED, Phase.RESUMING, Phase.PAUSING)
        for item in sandboxes.values()
        if item is not None and not item.spec.paused
    ):
        return BatchPhase.RESUMING
    if batch.spec.task_template is not None and batch.spec.replicas:
        ended = status.task_succeeded + status.task_failed
        if ended >= batch.spec.replicas:
            return BatchPhase.FAILED if status.task_failed else BatchPhase.COMPLETED
    return BatchPhase.RUNNING if status.ready >= due else BatchPhase.PENDING


def _conditions(
    batch: BatchSandbox,
    status: BatchSandboxStatus,
    clock: Clock,
    *,
    due: int,
    paused_shards: int,
    max_size: int | None,
) -> tuple[Condition, ...]:
    now = clock.now()
    over = status.phase in (BatchPhase.COMPLETED, BatchPhase.FAILED)
    paused = status.phase is BatchPhase.PAUSED
    is_ready = status.ready >= due and not batch.spec.pause
    text = f"{status.ready} of {due} are ready"
    if paused_shards and not batch.spec.pause:
        text += f", {paused_shards} are paused"
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
        reason, text = _pending_reason(batch, short, max_size) if pending else ("Allocated", "")
        new = Condition(
            type=CONDITION_PENDING,
            status=ConditionStatus.TRUE if pending else ConditionStatus.FALSE,
            reason=reason,
            message=text,
            observed_generation=batch.metadata.generation,
        )
        conditions = set_condition(conditions, new, now=now)
    return conditions


def _pending_reason(batch: BatchSandbox, short: int, max_size: int | None) -> tuple[str, str]:
    """Return reason and message for shards that wait."""
    text = f"{short} shards wait for a sandbox"
    policy = batch.spec.task_resource_policy_when_completed
    is_releasing = batch.spec.task_template is not None and policy is TaskResourcePolicy.RELEASE
    at_once = batch.spec.min_available or 0
    if max_size is None or max(at_once, 0 if is_releasing else batch.spec.replicas) <= max_size:
        return "WaitingForSandboxes", text
    text += f"; pool {batch.status.pool} may have {max_size} in all"
    if at_once > max_size:
        text += f", and {at_once} are wanted at once"
        return REASON_UNSATISFIABLE, text
    return REASON_TOO_SMALL, text


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
    """Return the conditions with one of them set."""
    new = Condition(
        type=kind,
        status=ConditionStatus.TRUE if holds else ConditionStatus.FALSE,
        reason=reason,
        message=text,
        observed_generation=batch.metadata.generation,
    )
    return set_condition(conditions, new, now=clock.now())
