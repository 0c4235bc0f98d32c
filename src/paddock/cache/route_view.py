"""The route view of a Sandbox: the fields that gateways need for routing, without the rest.

A route view is read-only. Writing one would erase the dropped fields, so a `Provider` of route
views refuses to write.
"""

from msgspec import structs

from paddock.resources.kinds.sandbox import (
    CONDITION_PAUSED,
    CONDITION_READY,
    LABEL_BATCH,
    LABEL_CLAIM,
    LABEL_POOL,
    LABEL_SHARD,
    LABEL_TEAM,
    LABEL_TEMPLATE,
    ClaimIdentity,
    PauseDeadlines,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.meta import ObjectMeta
from paddock.resources.transitions.pause_strategy import strategy_of

_LABELS = (LABEL_POOL, LABEL_TEMPLATE, LABEL_BATCH, LABEL_SHARD, LABEL_CLAIM, LABEL_TEAM)
_CONDITIONS = (CONDITION_READY, CONDITION_PAUSED)


def route_view(sandbox: Sandbox) -> Sandbox:
    """Return the sandbox with identity, flags, deadlines, access, address and phase only."""
    return Sandbox(
        metadata=_metadata(sandbox.metadata),
        spec=_spec(sandbox.spec),
        status=_status(sandbox.status),
    )


def _metadata(meta: ObjectMeta) -> ObjectMeta:
    labels = {name: meta.labels[name] for name in _LABELS if name in meta.labels}
    return ObjectMeta(
        name=meta.name,
        namespace=meta.namespace,
        uid=meta.uid,
        resource_version=meta.resource_version,
        generation=meta.generation,
        creation_timestamp=meta.creation_timestamp,
        deletion_timestamp=meta.deletion_timestamp,
        finalizers=meta.finalizers,
        labels=labels,
    )


def _spec(spec: SandboxSpec) -> SandboxSpec:
    network = spec.network
    if network is None and spec.template is not None:
        # The template is dropped, so its rules for incoming traffic are copied. So is its pause
        # strategy.
        network = spec.template.network
    return SandboxSpec(
        template_ref=spec.template_ref,
        paused=spec.paused,
        pause_strategy=strategy_of(spec),
        pause_time=spec.pause_time,
        shutdown_time=spec.shutdown_time,
        paused_retention_seconds=spec.paused_retention_seconds,
        retained_until=spec.retained_until,
        wake_on_traffic=spec.wake_on_traffic,
        network=None if network is None else _incoming(network),
        before_pause=_pause_request(spec),
        claim=None if spec.claim is None else _claim(spec.claim),
        recycle=spec.recycle,
    )


def _pause_request(spec: SandboxSpec) -> PauseDeadlines | None:
    before = spec.before_pause
    return None if before is None else PauseDeadlines(requested_at=before.requested_at)


def _incoming(network: NetworkPolicy) -> NetworkPolicy:
    return NetworkPolicy(
        allow_public_traffic=network.allow_public_traffic,
        mask_request_host=network.mask_request_host,
    )


def _claim(claim: ClaimIdentity) -> ClaimIdentity:
    return structs.replace(claim, metadata={}, env_vars={}, idempotency_key="")


def _status(status: SandboxStatus) -> SandboxStatus:
    conditions = tuple(
        structs.replace(item, message="") for item in status.conditions if item.type in _CONDITIONS
    )
    return SandboxStatus(
        observed_generation=status.observed_generation,
        phase=status.phase,
        conditions=conditions,
        runtime=status.runtime,
        node_name=status.node_name,
        address=status.address,
        incarnation=status.incarnation,
        started_at=status.started_at,
        paused_at=status.paused_at,
        checkpoint_id=status.checkpoint_id,
        pause_strategy=status.pause_strategy,
    )
