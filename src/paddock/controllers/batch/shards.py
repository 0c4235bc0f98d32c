"""Which shards a batch has, which need a sandbox, and which are released first. Pure.

Shard indexes are stable: task i belongs to shard i, and a shard that loses its sandbox keeps its
index and waits for another. A scale-in may leave gaps; a later scale-out fills the lowest index
first.
"""

from collections.abc import Iterable, Mapping

from paddock.resources.kinds.batch import (
    Allocation,
    BatchSandbox,
    TaskResourcePolicy,
    TaskResult,
    TaskState,
)
from paddock.resources.kinds.sandbox import (
    CONDITION_HEALTHY,
    CONDITION_READY,
    LABEL_BATCH,
    Phase,
    Sandbox,
)
from paddock.resources.meta import ConditionStatus, Key, condition, is_true

ANNOTATION_VICTIMS = "paddock.dev/scale-in-shards"
"""Shards to release first on a scale-in, such as `3,7`."""
OVER = (TaskState.SUCCEEDED, TaskState.FAILED)


def is_over(result: TaskResult | None, max_attempts: int) -> bool:
    """Whether a task has ended for good."""
    if result is None:
        return False
    if result.state is TaskState.SUCCEEDED:
        return True
    return result.state is TaskState.FAILED and (
        result.attempt >= max_attempts or result.reason == "Stopped"
    )


def results(batch: BatchSandbox) -> dict[int, TaskResult]:
    """Return the task result of each shard."""
    return {result.shard: result for result in batch.status.tasks}


def released_shards(batch: BatchSandbox) -> frozenset[int]:
    """Return the finished shards whose sandbox is to be released."""
    template = batch.spec.task_template
    policy = batch.spec.task_resource_policy_when_completed
    if template is None or policy is not TaskResourcePolicy.RELEASE:
        return frozenset()
    # The executor retries by itself: what it reports as ended has ended for good.
    return frozenset(item.shard for item in batch.status.tasks if item.state in OVER)


def wanted_shards(batch: BatchSandbox, lost: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Return the indexes of the desired shards, in order."""
    replicas = batch.spec.replicas
    known = {item.shard: item for item in batch.status.allocations}
    if len(known) > replicas:
        kept = sorted(known, key=_release_order(batch, known, lost), reverse=True)[:replicas]
        return tuple(sorted(kept))
    wanted = set(known)
    index = 0
    while len(wanted) < replicas:
        wanted.add(index)
        index += 1
    return tuple(sorted(wanted))


def _release_order(batch: BatchSandbox, known: Mapping[int, Allocation], lost: frozenset[int]):
    """Return a sort key: shards with the lowest key are released first."""
    named = named_victims(batch)
    tasks = results(batch)

    def rank(shard: int) -> tuple[bool, bool, bool, bool, int]:
        task = tasks.get(shard)
        return (
            shard not in named,
            bool(known[shard].sandbox),
            shard not in lost,
            task is None or task.state not in OVER,
            -shard,
        )

    return rank


def named_victims(batch: BatchSandbox) -> frozenset[int]:
    """Return the shards that the annotation names for release."""
    text = batch.metadata.annotations.get(ANNOTATION_VICTIMS, "")
    return frozenset(int(part) for part in text.split(",") if part.strip().isdigit())


def missing_shards(batch: BatchSandbox) -> tuple[int, ...]:
    """Return the shards that need a sandbox, in order."""
    if batch.is_deleting or batch.spec.pause:
        return ()
    done = released_shards(batch)
    held = {item.shard for item in batch.status.allocations if item.sandbox}
    return tuple(i for i in wanted_shards(batch) if i not in held and i not in done)


def sandbox_key(batch: BatchSandbox, allocation: Allocation) -> Key:
    """Return the key of a shard's sandbox."""
    return Key(allocation.namespace or batch.metadata.namespace, allocation.sandbox)


def is_claimed_by(batch: BatchSandbox, sandbox: Sandbox) -> bool:
    """Whether a sandbox has the claim of this batch."""
    claim = sandbox.spec.claim
    return claim is not None and (
        claim.idempotency_key.startswith(f"batch:{batch.metadata.uid}:")
        or sandbox.metadata.labels.get(LABEL_BATCH) == batch.metadata.name
    )


def loss(batch: BatchSandbox, allocation: Allocation, sandbox: Sandbox | None) -> str:
    """Return why a shard lost its sandbox; empty if it did not."""
    if sandbox is None:
        return "its sandbox does not exist"
    if sandbox.metadata.uid != allocation.uid:
        return "its sandbox was recreated with the same name"
    if sandbox.is_deleting:
        return "its sandbox is being deleted"
    if sandbox.status.phase in (Phase.FAILED, Phase.SUCCEEDED):
        return sandbox.status.message or f"its sandbox is {sandbox.status.phase}"
    if sandbox.spec.claim is not None and not is_claimed_by(batch, sandbox):
        return "its sandbox was claimed by another owner"
    return ""


def is_ready(sandbox: Sandbox | None) -> bool:
    """Whether a shard's sandbox is ready."""
    if sandbox is None or sandbox.is_deleting or sandbox.status.phase is not Phase.RUNNING:
        return False
    healthy = condition(sandbox.status.conditions, CONDITION_HEALTHY)
    if healthy is not None and healthy.status is ConditionStatus.FALSE:
        return False
    return is_true(sandbox.status.conditions, CONDITION_READY)


def emptied(allocation: Allocation) -> Allocation:
    """Return the allocation of a shard without a sandbox."""
    return Allocation(shard=allocation.shard)


def granted(
    batch: BatchSandbox, sandboxes: Iterable[tuple[int, Sandbox, str]]
) -> tuple[Allocation, ...]:
    """Return the batch's allocations with further shards served: (index, sandbox, public id)."""
    after = {item.shard: item for item in batch.status.allocations}
    for shard, sandbox, sandbox_id in sandboxes:
        elsewhere = sandbox.metadata.namespace != batch.metadata.namespace
        after[shard] = Allocation(
            shard=shard,
            sandbox=sandbox.metadata.name,
            namespace=sandbox.metadata.namespace if elsewhere else "",
            uid=sandbox.metadata.uid,
            sandbox_id=sandbox_id,
        )
    return tuple(after[shard] for shard in sorted(after))


def trimmed(batch: BatchSandbox, wanted: Iterable[int]) -> tuple[Allocation, ...]:
    """Return the allocations of the wanted shards only."""
    kept = set(wanted)
    return tuple(item for item in batch.status.allocations if item.shard in kept)


def replaced(
    allocations: tuple[Allocation, ...], changes: Mapping[int, Allocation]
) -> tuple[Allocation, ...]:
    """Return allocations with some shards replaced."""
    return tuple(changes.get(item.shard, item) for item in allocations)
