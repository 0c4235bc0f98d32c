"""Equal values of loaded objects are shared and unchanged."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec, SandboxStatus
from paddock.resources.kinds.template import SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import Condition, ConditionStatus, ObjectMeta
from paddock.store.interning import Interner


def sandbox(number: int) -> Sandbox:
    since = datetime(2030, 1, 1, 0, number % 60, tzinfo=UTC)
    ready = Condition(
        type="Ready",
        status=ConditionStatus.TRUE,
        reason="Healthy",
        message="as it should be",
        last_transition_time=since,
    )
    return Sandbox(
        metadata=ObjectMeta(
            name=f"box-{number}", namespace=f"team-{number % 3}", labels={"pool": f"p{number % 5}"}
        ),
        spec=SandboxSpec(
            template=SandboxTemplateSpec(
                env={"A": "1"}, pod_template={"replicas": 1 if number % 2 else True}
            )
            if number % 2
            else None,
            template_ref=TemplateRef(name="python") if number % 2 == 0 else None,
        ),
        status=SandboxStatus(conditions=(ready,), node_name="node-1"),
    )


def loaded(count: int) -> list[Sandbox]:
    interner = Interner()
    objects = [codec.decode(Sandbox, codec.encode(sandbox(number))) for number in range(count)]
    for obj in objects:
        interner.share(obj)
    return objects


def test_interning_does_not_change_objects():
    for number, obj in enumerate(loaded(1500)):
        assert codec.encode(obj) == codec.encode(sandbox(number))


def test_repeated_values_are_shared():
    objects = loaded(1500)
    for first, second in ((3, 33), (1003, 1033)):
        one, other = objects[first], objects[second]
        assert one.metadata.labels is other.metadata.labels
        assert one.metadata.namespace is other.metadata.namespace
        assert one.status.node_name is other.status.node_name
        assert one.status.conditions[0].message is other.status.conditions[0].message
    assert objects[4].spec.template_ref is objects[1004].spec.template_ref


def test_equal_values_of_different_types_are_not_shared():
    class Loose(Struct, frozen=True, gc=False):
        values: Mapping[str, Any]

    interner = Interner()
    objects = [Loose({"n": value}) for value in (1, True, 1.0)]
    for obj in objects:
        interner.share(obj)
    assert [type(obj.values["n"]) for obj in objects] == [int, bool, float]
