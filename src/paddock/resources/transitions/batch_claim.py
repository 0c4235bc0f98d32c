"""The claim of a shard's sandbox, which makes it addressable for gateways and clients. Pure.

A batch's status records its sandboxes. Nothing is written to a sandbox until a client addresses
it by its public id (or at once, where other processes could claim it meanwhile).
"""

from datetime import datetime

from msgspec import structs

from paddock.resources.kinds.batch import Allocation, BatchSandbox
from paddock.resources.kinds.sandbox import LABEL_BATCH, LABEL_SHARD, ClaimIdentity, Sandbox
from paddock.resources.tokens import TokenSeed, hashed
from paddock.resources.transitions.claim import Terms, claimed


def owner_of(batch: BatchSandbox) -> str:
    """Return the team that a batch's sandboxes belong to."""
    return batch.spec.owner or batch.metadata.namespace


def terms(batch: BatchSandbox, allocation: Allocation, seed: TokenSeed, *, now: datetime) -> Terms:
    """Return the terms of a shard's claim."""
    public = allocation.sandbox_id
    identity = ClaimIdentity(
        sandbox_id=public,
        owner=owner_of(batch),
        lock=f"{batch.metadata.uid}-{allocation.shard}-{public}",
        claim_time=now,
        template_id=batch.status.pool or batch.metadata.name,
        access_token_hash=hashed(seed.access_token(public)),
        idempotency_key=f"batch:{batch.metadata.uid}:{allocation.shard}:{public}",
        metadata={"batch": batch.metadata.name, "shard": str(allocation.shard)},
    )
    return Terms(
        identity=identity,
        shutdown_time=batch.spec.expire_time,
        labels={LABEL_BATCH: batch.metadata.name, LABEL_SHARD: str(allocation.shard)},
    )


def stamped(
    sandbox: Sandbox,
    batch: BatchSandbox,
    allocation: Allocation,
    seed: TokenSeed,
    *,
    now: datetime,
) -> Sandbox:
    """Return the sandbox with the claim of its batch."""
    new = claimed(sandbox, terms(batch, allocation, seed, now=now), now=now)
    # Becoming addressable does not resume a sandbox: a paused batch stays paused.
    return structs.replace(new, spec=structs.replace(new.spec, paused=sandbox.spec.paused))
