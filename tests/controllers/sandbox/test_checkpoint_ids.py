"""Ids of checkpoints are never mistaken for names, which teams choose."""

from collections.abc import Hashable
from typing import Any

import pytest
from msgspec import structs

from paddock.cache import indexes
from paddock.claims.caller import Caller, Role
from paddock.claims.template_resolver import TemplateResolver
from paddock.controllers.sandbox.templates import CachedTemplates
from paddock.kit import ids
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.manager.sandboxes.snapshots import names_of
from paddock.resources.kinds.checkpoint import (
    Checkpoint,
    CheckpointPhase,
    CheckpointSpec,
    CheckpointStatus,
)
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, Resource

ID = ids.checkpoint_id("layer")
TEMPLATE = SandboxTemplate(
    metadata=ObjectMeta(name="t", namespace="blue"),
    spec=SandboxTemplateSpec(restore_from=ID, public=True),
)


class Objects:
    """The informer of a kind, with objects in a given order."""

    is_synced = True

    def __init__(self, *objects: Resource) -> None:
        self._objects = objects

    def view(self, index: str, value: Hashable) -> list[Resource]:
        return [
            one for one in self._objects if value in indexes.definitions()[type(one)][index](one)
        ]

    def informer(self, _kind: type[Resource]) -> "Objects":
        return self


def stored(team: str, checkpoint_id: str, *names: str, namespace: str = "blue") -> Checkpoint:
    return Checkpoint(
        metadata=ObjectMeta(name=f"of-{team}", namespace=namespace, uid=f"uid-of-{team}"),
        spec=CheckpointSpec(sandbox_name="s", owner=team, names=names),
        status=CheckpointStatus(
            phase=CheckpointPhase.SUCCEEDED,
            checkpoint_id=checkpoint_id,
            template=SandboxTemplateSpec(user=team),
        ),
    )


def sandbox(namespace: str, restore_from: str | None = None) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(name="s", namespace=namespace),
        spec=SandboxSpec(
            template=None if restore_from else TEMPLATE.spec, restore_from=restore_from
        ),
    )


def templates(*checkpoints: Checkpoint, also: tuple[SandboxTemplate, ...] = ()) -> CachedTemplates:
    none: Any = None
    found: Any = Objects(*checkpoints)
    of_kind: Any = Objects(TEMPLATE, *also)
    return CachedTemplates(of_kind, found, none)


@pytest.mark.parametrize("is_thief_first", [True, False])
@pytest.mark.parametrize("namespace", ["blue", "red"])
def test_a_template_starts_from_its_checkpoint_not_from_one_named_like_its_id(
    namespace: str, is_thief_first: bool
) -> None:
    pair = (stored("red", "snapother", ID, namespace=namespace), stored("blue", ID))
    public_too = structs.replace(TEMPLATE, metadata=ObjectMeta(name="u", namespace="red"))
    found = templates(*(pair if is_thief_first else pair[::-1]), also=(public_too,))
    for home in ("blue", "red", "green"):
        assert found.checkpoint_of(sandbox(home), TEMPLATE.spec) == "uid-of-blue"
    restored = sandbox("green", restore_from=ID)
    assert found.checkpoint_of(restored, TEMPLATE.spec) == "uid-of-blue"
    assert found.of(restored).user == "blue"


def test_a_name_like_a_deleted_checkpoint_is_not_started_from() -> None:
    with pytest.raises(NotFoundError):
        templates(stored("blue", "snapother", ID)).checkpoint_of(sandbox("blue"), TEMPLATE.spec)


@pytest.mark.parametrize("is_named_first", [True, False])
@pytest.mark.parametrize("is_operator", [True, False])
def test_an_id_precedes_the_names_of_the_callers_own_snapshots(
    is_named_first: bool, is_operator: bool
) -> None:
    pair = (stored("red", "snapother", ID), stored("blue" if is_operator else "red", ID))
    provider: Any = Objects(*(pair if is_named_first else pair[::-1]))
    caller = Caller("red", role=Role.OPERATOR if is_operator else Role.MEMBER)
    found = TemplateResolver(provider).checkpoint(caller, ID)
    assert found is pair[1]


@pytest.mark.parametrize("form", ["{}", "{}:v1", "red/{}", "red/{}:default"])
@pytest.mark.parametrize(
    "checkpoint_id",
    [ids.checkpoint_id("snap"), ids.checkpoint_id("layer"), "snap" + "0a" * 16],
    ids=["snapshot", "layer", "older form"],
)
def test_a_snapshot_cannot_be_named_like_an_id(form: str, checkpoint_id: str) -> None:
    for text in (checkpoint_id, checkpoint_id.upper()):
        with pytest.raises(InvalidError, match="has the form of an id"):
            names_of(Caller("red"), form.format(text))
    assert names_of(Caller("red"), "snapshot") == (
        "red/snapshot:default",
        "snapshot:default",
        "snapshot",
    )
