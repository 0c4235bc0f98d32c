"""Sandboxes in the states that tests need."""

from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from paddock.resources.kinds.sandbox import (
    CONDITION_PAUSED,
    CONDITION_READY,
    LABEL_POOL,
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Condition, ConditionStatus, ObjectMeta, is_true, set_condition

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


def identity(sandbox_id: str = "i1", *, owner: str = "team", **more: Any) -> ClaimIdentity:
    return ClaimIdentity(sandbox_id=sandbox_id, owner=owner, lock="lock", claim_time=EPOCH, **more)


def sandbox(
    name: str = "box",
    *,
    namespace: str = "default",
    phase: Phase = Phase.RUNNING,
    ready: bool | None = None,
    pool: str | None = None,
    labels: dict[str, str] | None = None,
    claim: ClaimIdentity | None = None,
    message: str = "",
    **spec: Any,
) -> Sandbox:
    """Return a sandbox in a phase; `ready` defaults to whether it is running."""
    labels = dict(labels or {})
    if pool is not None:
        labels[LABEL_POOL] = pool
    obj = Sandbox(
        metadata=ObjectMeta(name=name, namespace=namespace, labels=labels),
        spec=SandboxSpec(template=SandboxTemplateSpec(), claim=claim, **spec),
        status=SandboxStatus(message=message),
    )
    return in_phase(obj, phase, ready=ready)


def in_phase(obj: Sandbox, phase: Phase, *, ready: bool | None = None) -> Sandbox:
    """Return the sandbox with the status that a controller records in this phase."""
    is_ready = phase is Phase.RUNNING if ready is None else ready
    conditions = obj.status.conditions
    for kind, holds in ((CONDITION_READY, is_ready), (CONDITION_PAUSED, phase is Phase.PAUSED)):
        if is_true(conditions, kind) is not holds or not conditions:
            status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
            new = Condition(type=kind, status=status, reason=str(phase))
            conditions = set_condition(conditions, new, now=EPOCH)
    status = structs.replace(
        obj.status,
        phase=phase,
        conditions=conditions,
        observed_generation=obj.metadata.generation,
    )
    return structs.replace(obj, status=status)


def with_spec(obj: Sandbox, **changes: Any) -> Sandbox:
    return structs.replace(obj, spec=structs.replace(obj.spec, **changes))
