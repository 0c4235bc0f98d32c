"""The status of a sandbox after a transition. Pure."""

from datetime import datetime

from msgspec import structs

from paddock.controllers.sandbox.lifecycle import Trigger, move
from paddock.resources.kinds.sandbox import (
    CONDITION_IMAGE,
    CONDITION_LIMITED,
    CONDITION_PAUSED,
    CONDITION_READY,
    Phase,
    Sandbox,
    SandboxAddress,
    SandboxStatus,
)
from paddock.resources.meta import Condition, ConditionStatus, set_condition
from paddock.runtime.port import Instance


def moved(
    sandbox: Sandbox,
    trigger: Trigger | None,
    instance: Instance | None,
    *,
    runtime: str,
    now: datetime,
) -> SandboxStatus:
    """Return the status after a transition, if any, with the facts of the instance."""
    old = sandbox.status
    phase = move(old.phase, trigger) if trigger is not None else old.phase
    runs, paused = phase is Phase.RUNNING, phase is Phase.PAUSED
    at = instance.address if instance is not None else None
    address = SandboxAddress(ip=at.ip, envd=at.envd, node=at.node) if at else old.address
    reason = "Running" if runs else str(phase)
    conditions = with_condition(sandbox, CONDITION_READY, holds=runs, reason=reason, now=now)
    if paused or any(item.type == CONDITION_PAUSED for item in conditions):
        new = _condition(sandbox, CONDITION_PAUSED, holds=paused, reason=reason)
        conditions = set_condition(conditions, new, now=now)
    if trigger is Trigger.RECYCLED:
        old = structs.replace(old, hibernation_failures=None)
    elif runs:
        old = runnable_again(old)
    if runs and any(item.type == CONDITION_IMAGE for item in conditions):
        new = _condition(sandbox, CONDITION_IMAGE, holds=True, reason="Pulled")
        conditions = set_condition(conditions, new, now=now)
    note = instance.limits_note if instance is not None else ""
    is_noted = any(item.type == CONDITION_LIMITED for item in conditions)
    if note or (is_noted and instance is not None):
        reason = "EnforcedInPart" if note else "Enforced"
        new = _condition(sandbox, CONDITION_LIMITED, holds=not note, reason=reason, text=note)
        conditions = set_condition(conditions, new, now=now)
    return structs.replace(
        old,
        observed_generation=sandbox.metadata.generation,
        phase=phase,
        message="",
        conditions=conditions,
        runtime=runtime,
        node_name=(instance.node_name or "") if instance else old.node_name,
        address=address,
        incarnation=instance.incarnation if instance else old.incarnation,
        started_at=old.started_at or (instance.started_at if instance else None),
        image=instance.image if instance else old.image,
        image_digest=instance.image_digest if instance else old.image_digest,
        stored_bytes=instance.stored_bytes if instance else old.stored_bytes,
    )


def runnable_again(status: SandboxStatus) -> SandboxStatus:
    """Return the status of a sandbox that runs: what could not be stored may have changed."""
    failures = status.hibernation_failures
    if failures is None or not failures.is_final:
        return status
    return structs.replace(status, hibernation_failures=structs.replace(failures, is_final=False))


def with_condition(
    sandbox: Sandbox, kind: str, *, holds: bool, reason: str, text: str = "", now: datetime
) -> tuple[Condition, ...]:
    """Return the sandbox's conditions with one of them set."""
    new = _condition(sandbox, kind, holds=holds, reason=reason, text=text)
    return set_condition(sandbox.status.conditions, new, now=now)


def _condition(
    sandbox: Sandbox, kind: str, *, holds: bool, reason: str, text: str = ""
) -> Condition:
    return Condition(
        type=kind,
        status=ConditionStatus.TRUE if holds else ConditionStatus.FALSE,
        reason=reason,
        message=text,
        observed_generation=sandbox.metadata.generation,
    )
