"""The terms of a claim: identity, tokens, deadlines, overrides. Pure.

One builder for each origin of a claim: API request, SandboxClaim, shard of a batch. All claim
identities are built here; `resources/transitions/claim.py` applies the terms to a sandbox.
"""

from datetime import datetime

from msgspec import UnsetType, structs

from paddock.claims.caller import Caller
from paddock.claims.requests import NewSandbox
from paddock.kit import ids
from paddock.resources.kinds.batch import Allocation, BatchSandbox
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.sandbox import (
    LABEL_BATCH,
    LABEL_CLAIM,
    LABEL_SHARD,
    ClaimIdentity,
    Sandbox,
    WakeOnTraffic,
)
from paddock.resources.meta import key_of
from paddock.resources.tokens import TokenSeed, hashed
from paddock.resources.transitions.claim import ClaimRequirements, Terms, claimed


def request_terms(
    caller: Caller,
    request: NewSandbox,
    requirements: ClaimRequirements,
    seed: TokenSeed,
    *,
    account: str,
    idempotency_hash: str,
    retention_seconds: int | None = None,
    now: datetime,
) -> Terms:
    """Return the terms of an API request; each call has an id and a lock of its own."""
    sandbox_id = request.sandbox_id or ids.sandbox_id()
    identity = ClaimIdentity(
        sandbox_id=sandbox_id,
        owner=caller.team,
        key_id=caller.key_id,
        lock=ids.uid(),
        claim_time=now,
        template_id=request.template,
        access_token_hash=hashed(seed.access_token(sandbox_id)) if request.secure else "",
        account=account,
        network_opened=requirements.network_opened,
        idempotency_key=request.idempotency_key,
        idempotency_hash=idempotency_hash,
        metadata=request.metadata,
        env_vars=request.env_vars,
        timeout_seconds=request.timeout_seconds,
        auto_pause=request.auto_pause,
        auto_pause_memory=request.auto_pause_memory,
    )
    wake = None
    if request.auto_resume:
        wake = WakeOnTraffic(enabled=True, timeout_seconds=request.timeout_seconds or 300)
    return Terms(
        identity=identity,
        wake=wake,
        idle_pause=request.idle_pause,
        network=requirements.network,
        traffic_token_hash=hashed(seed.traffic_token(sandbox_id)),
        resources=requirements.resources,
        image=requirements.image,
        paused_retention_seconds=(
            retention(request.timeout_seconds, retention_seconds)
            if isinstance(request.paused_retention_seconds, UnsetType)
            else request.paused_retention_seconds
        ),
        pause_strategy=request.pause_strategy,
        labels=request.labels,
    )


def sandbox_claim_terms(
    claim: SandboxClaim,
    requirements: ClaimRequirements,
    seed: TokenSeed,
    *,
    account: str,
    retention_seconds: int | None = None,
    now: datetime,
) -> Terms:
    """Return the terms of one sandbox of a SandboxClaim; its namespace is the owning team."""
    sandbox_id = ids.sandbox_id()
    end = claim.spec.shutdown_time
    identity = ClaimIdentity(
        sandbox_id=sandbox_id,
        owner=claim.metadata.namespace,
        key_id=key_of(claim),
        lock=ids.uid(),
        claim_time=now,
        claim_uid=claim.metadata.uid,
        template_id=claim.spec.template_name,
        account=account,
        access_token_hash=hashed(seed.access_token(sandbox_id)),
        env_vars=claim.spec.env_vars,
        # The fixed end as a timeout too: pausing and extending read the timeout.
        timeout_seconds=None if end is None else max(int((end - now).total_seconds()), 1),
    )
    return Terms(
        identity=identity,
        network=requirements.network,
        traffic_token_hash=hashed(seed.traffic_token(sandbox_id)),
        resources=requirements.resources,
        image=requirements.image,
        shutdown_time=end,
        paused_retention_seconds=retention(identity.timeout_seconds, retention_seconds),
        labels={**claim.spec.labels, LABEL_CLAIM: claim.metadata.name},
        annotations=claim.spec.annotations,
    )


def retention(timeout_seconds: int | None, default_seconds: int | None) -> int | None:
    """Return the default retention of a paused sandbox; one without a timeout is kept."""
    return None if timeout_seconds is None else default_seconds


# ---- batches -----------------------------------------------------------------------------


def batch_owner(batch: BatchSandbox) -> str:
    """Return the team that a batch's sandboxes belong to."""
    return batch.spec.owner or batch.metadata.namespace


def shard_terms(
    batch: BatchSandbox, allocation: Allocation, seed: TokenSeed, *, now: datetime
) -> Terms:
    """Return the terms of a shard; id, lock and idempotency key follow from its allocation."""
    sandbox_id = allocation.sandbox_id
    identity = ClaimIdentity(
        sandbox_id=sandbox_id,
        owner=batch_owner(batch),
        key_id=key_of(batch),
        lock=f"{batch.metadata.uid}-{allocation.shard}-{sandbox_id}",
        claim_time=now,
        template_id=batch.status.pool or batch.metadata.name,
        access_token_hash=hashed(seed.access_token(sandbox_id)),
        idempotency_key=f"batch:{batch.metadata.uid}:{allocation.shard}:{sandbox_id}",
        metadata={"batch": batch.metadata.name, "shard": str(allocation.shard)},
    )
    return Terms(
        identity=identity,
        traffic_token_hash=hashed(seed.traffic_token(sandbox_id)),
        shutdown_time=batch.spec.expire_time,
        labels={LABEL_BATCH: batch.metadata.name, LABEL_SHARD: str(allocation.shard)},
    )


def claimed_for_shard(
    sandbox: Sandbox,
    batch: BatchSandbox,
    allocation: Allocation,
    seed: TokenSeed,
    *,
    now: datetime,
) -> Sandbox:
    """Return a sandbox that the batch holds with its claim, which makes it addressable.

    The batch's status records its sandboxes. Nothing is written to a sandbox until a client
    addresses it by its public id (or at once, where other processes could claim it meanwhile).
    """
    new = claimed(sandbox, shard_terms(batch, allocation, seed, now=now), now=now)
    # Becoming addressable does not resume a sandbox: a paused batch stays paused.
    return structs.replace(new, spec=structs.replace(new.spec, paused=sandbox.spec.paused))
