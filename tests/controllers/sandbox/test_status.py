"""The status of a sandbox shows which of its limits its machine enforces in part."""

from datetime import UTC, datetime

from msgspec import structs

from paddock.controllers.sandbox.status import moved
from paddock.resources.kinds.sandbox import CONDITION_LIMITED, Sandbox
from paddock.resources.meta import ConditionStatus, ObjectMeta, condition
from paddock.runtime.port import Instance, InstanceState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def after(sandbox: Sandbox, note: str | None) -> Sandbox:
    instance = None
    if note is not None:
        instance = Instance(uid="u", state=InstanceState.RUNNING, limits_note=note)
    return structs.replace(sandbox, status=moved(sandbox, None, instance, runtime="local", now=NOW))


def test_limits_that_are_enforced_in_part_are_a_condition_until_all_are() -> None:
    sandbox = after(Sandbox(metadata=ObjectMeta(name="s")), "")
    assert condition(sandbox.status.conditions, CONDITION_LIMITED) is None
    sandbox = after(sandbox, "cgroup v1")
    found = condition(sandbox.status.conditions, CONDITION_LIMITED)
    assert found is not None
    assert (found.status, found.reason) == (ConditionStatus.FALSE, "EnforcedInPart")
    assert found.message == "cgroup v1"
    sandbox = after(sandbox, None)
    assert condition(sandbox.status.conditions, CONDITION_LIMITED) == found
    found = condition(after(sandbox, "").status.conditions, CONDITION_LIMITED)
    assert found is not None
    assert found.status is ConditionStatus.TRUE
