"""Which shards a batch has, which of them want a sandbox, and which go first: pure decisions.

Shards are index-stable: task i belongs to shard i, and a shard that loses its sandbox keeps its
index and waits for another one. After a scale-in the indexes that are left may have gaps; a later
scale-out fills the lowest first.
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
"""Shards to give up first, such as `3,7`."""
OVER = (TaskState.SUCCEEDED, TaskState.FAILED)


def is_over(result: TaskResult | None, max_attempts: int) -> bool:
    """Say whether a task has ended for good."""
    if result is None:
        return False
    if result.state is TaskState.SUCCEEDED:
        return True
    return result.state is TaskState.FAILED and (
        result.attempt >= max_attempts or result.reason == "Stopped"
    )


def results(batch: BatchSandbox) -> dict[int, TaskResult]:
    """Give what is known of each shard's task."""
    return {result.shard: result for result in batch.status.tasks}


def released_shards(batch: BatchSandbox) -> frozenset[int]:
    """Give the shards whose work is done and whose sandbox goes back."""
    template = batch.spec.task_template
    policy = batch.spec.task_resource_policy_when_completed
    if template is None or policy is not TaskResourcePolicy.RELEASE:
        return frozenset()
    # The executor tries again by itself; what it reports as ended has ended for good.
    return frozenset(item.shard for item in batch.status.tasks if item.state in OVER)


def wanted_shards(batch: BatchSandbox, lost: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Give the indexes of the shards that a batch should have, in order."""
    replicas = batch.spec.replicas
    known = {item.shard: item for item in batch.status.allocations}
    if len(known) > replicas:
        kept = sorted(known, key=_reluctance(batch, known, lost), reverse=True)[:replicas]
        return tuple(sorted(kept))
    wanted = set(known)
    index = 0
    while len(wanted) < replicas:
        wanted.add(index)
        index += 1
    return tuple(sorted(wanted))


def _reluctance(batch: BatchSandbox, known: Mapping[int, Allocation], lost: frozenset[int]):
    """Rank shards by how unwillingly they are given up."""
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
    """Read which shards the owner would give up first."""
    text = batch.metadata.annotations.get(ANNOTATION_VICTIMS, "")
    return frozenset(int(part) for part in text.split(",") if part.strip().isdigit())


def missing_shards(batch: BatchSandbox) -> tuple[int, ...]:
    """Give the shards that want a sandbox and have none, in order."""
    if batch.is_deleting or batch.spec.pause:
        return ()
    done = released_shards(batch)
    held = {item.shard for item in batch.status.allocations if item.sandbox}
    return tuple(i for i in wanted_shards(batch) if i not in held and i not in done)


def sandbox_key(batch: BatchSandbox, allocation: Allocation) -> Key:
    """Give where a shard's sandbox is."""
    return Key(allocation.namespace or batch.metadata.namespace, allocation.sandbox)


def is_batch_mark(batch: BatchSandbox, sandbox: Sandbox) -> bool:
    """Say whether a sandbox bears the claim of this batch."""
    claim = sandbox.spec.claim
    return claim is not None and (
        claim.idempotency_key.startswith(f"batch:{batch.metadata.uid}:")
        or sandbox.metadata.labels.get(LABEL_BATCH) == batch.metadata.name
    )


def loss(batch: BatchSandbox, allocation: Allocation, sandbox: Sandbox | None) -> str:
    """Say why a shard's sandbox is lost to it; empty where it is not."""
    if sandbox is None:
        return "its sandbox is gone"
    if sandbox.metadata.uid != allocation.uid:
        return "its sandbox was replaced by a namesake"
    if sandbox.is_deleting:
        return "its sandbox is being deleted"
    if sandbox.status.phase in (Phase.FAILED, Phase.SUCCEEDED):
        return sandbox.status.message or f"its sandbox is {sandbox.status.phase}"
    if sandbox.spec.claim is not None and not is_batch_mark(batch, sandbox):
        return "its sandbox was claimed by somebody else"
    return ""


def is_ready(sandbox: Sandbox | None) -> bool:
    """Say whether a shard's sandbox can work."""
    if sandbox is None or sandbox.is_deleting or sandbox.status.phase is not Phase.RUNNING:
        return False
    healthy = condition(sandbox.status.conditions, CONDITION_HEALTHY)
    if healthy is not None and healthy.status is ConditionStatus.FALSE:
        return False
    return is_true(sandbox.status.conditions, CONDITION_READY)


def emptied(allocation: Allocation) -> Allocation:
    """Give a shard that waits for another sandbox."""
    return Allocation(shard=allocation.shard)


def granted(
    batch: BatchSandbox, sandboxes: Iterable[tuple[int, Sandbox, str]]
) -> tuple[Allocation, ...]:
    """Give the batch's allocations with further shards served: index, sandbox, public id."""
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
    """Give the allocations of the wanted shards alone."""
    kept = set(wanted)
    return tuple(item for item in batch.status.allocations if item.shard in kept)


def replaced(
    allocations: tuple[Allocation, ...], changes: Mapping[int, Allocation]
) -> tuple[Allocation, ...]:
    """Give allocations with some shards changed."""
    return tuple(changes.get(item.shard, item) for item in allocations)
