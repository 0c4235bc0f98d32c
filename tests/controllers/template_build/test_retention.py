"""Which layers and builds are deleted, and which are needed."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from paddock.controllers.template_build import retention
from paddock.controllers.template_build.retention import (
    ANNOTATION_USED,
    BUILDS_KEPT,
    REPLACED_FOR,
    UNUSED_FOR,
    excess_logs,
    unneeded_builds,
    unneeded_layers,
)
from paddock.resources.kinds.checkpoint import (
    Checkpoint,
    CheckpointPhase,
    CheckpointSpec,
    CheckpointStatus,
)
from paddock.resources.kinds.template import (
    SandboxTemplate,
    SandboxTemplateSpec,
    SandboxTemplateStatus,
    TemplateTag,
)
from paddock.resources.kinds.template_build import (
    LABEL_LAYER,
    BuildPhase,
    TemplateBuild,
    TemplateBuildSpec,
    TemplateBuildStatus,
)
from paddock.resources.meta import ObjectMeta

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LONG = UNUSED_FOR + timedelta(hours=1)


def layer(
    name: str,
    *,
    age: timedelta = LONG,
    key: str = "",
    used: datetime | None = None,
    phase: CheckpointPhase = CheckpointPhase.SUCCEEDED,
    namespace: str = "red",
) -> Checkpoint:
    return Checkpoint(
        metadata=ObjectMeta(
            name=name,
            namespace=namespace,
            labels={LABEL_LAYER: key or name},
            annotations={ANNOTATION_USED: used.isoformat()} if used else {},
        ),
        spec=CheckpointSpec(sandbox_name="x", owner=namespace),
        status=CheckpointStatus(phase=phase, checkpoint_id=name, completion_time=NOW - age),
    )


def template(restore_from: str | None = None, *tags: str) -> SandboxTemplate:
    tagged = tuple(TemplateTag(tag=name, build=name, assigned_at=NOW) for name in tags)
    return SandboxTemplate(
        metadata=ObjectMeta(name="t", namespace="red"),
        spec=SandboxTemplateSpec(restore_from=restore_from),
        status=SandboxTemplateStatus(tags=tagged),
    )


def build(
    name: str,
    result: str = "",
    *,
    age: int = 0,
    phase: BuildPhase = BuildPhase.READY,
    tags: tuple[str, ...] = (),
) -> TemplateBuild:
    return TemplateBuild(
        metadata=ObjectMeta(name=name, namespace="red"),
        spec=TemplateBuildSpec(template_name="t", tags=tags),
        status=TemplateBuildStatus(
            phase=phase,
            template=SandboxTemplateSpec(restore_from=result or None),
            completion_time=NOW - timedelta(hours=age),
        ),
    )


def deleted(
    *layers: Checkpoint,
    templates: tuple[SandboxTemplate, ...] = (),
    builds: tuple[TemplateBuild, ...] = (),
) -> list[str]:
    return [one.metadata.name for one in unneeded_layers(layers, templates, builds, now=NOW)]


def test_a_team_keeps_a_number_of_ended_builds_in_all_its_templates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "TEAM_BUILDS_KEPT", 3)
    builds = [
        TemplateBuild(
            metadata=structs.replace(one.metadata, namespace=team),
            spec=structs.replace(one.spec, template_name=one.metadata.name),
            status=one.status,
        )
        for team in ("red", "blue")
        for one in (build(f"{team}-{age}", age=age) for age in range(4))
    ]
    named = template(None, "red-3")
    assert {one.metadata.name for one in unneeded_builds(builds, [])} == {"red-3", "blue-3"}
    assert {one.metadata.name for one in unneeded_builds(builds, [named])} == {"blue-3"}


def test_the_oldest_logs_of_a_team_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "TEAM_LOG_BYTES", 100)
    builds = [with_uid(build(f"b{age}", age=age)) for age in range(4)]
    running = with_uid(build("running", age=9, phase=BuildPhase.BUILDING))
    other = structs.replace(builds[3], metadata=ObjectMeta(name="o", namespace="blue", uid="o"))
    sizes = {"b0": 60, "b1": 40, "b3": 1, "running": 1000, "o": 100, "without a build": 1000}
    assert excess_logs([*builds, running, other], sizes) == ("b3",)


def with_uid(one: TemplateBuild) -> TemplateBuild:
    return structs.replace(one, metadata=structs.replace(one.metadata, uid=one.metadata.name))


def test_a_layer_is_kept_for_a_while_after_its_last_use() -> None:
    recent = layer("recent", age=UNUSED_FOR)
    used = layer("used", used=NOW - timedelta(days=1))
    assert deleted(recent, used, layer("old")) == ["old"]


def test_what_a_template_starts_from_is_kept() -> None:
    assert deleted(layer("a"), layer("b"), templates=(template("a"),)) == ["b"]


def test_a_template_of_another_namespace_keeps_nothing() -> None:
    assert deleted(layer("a", namespace="blue"), templates=(template("a"),)) == ["a"]


def test_the_results_of_builds_are_kept_as_long_as_their_template() -> None:
    builds = (build("b1", "a"),)
    assert deleted(layer("a"), templates=(template(),), builds=builds) == []
    assert deleted(layer("a"), builds=builds) == ["a"]


def test_a_layer_that_was_stored_again_is_soon_deleted() -> None:
    old = layer("old", key="k", age=REPLACED_FOR * 2)
    new = layer("new", key="k", age=timedelta())
    just_replaced = layer("just", key="k", age=timedelta(minutes=1))
    assert deleted(old, new, just_replaced) == ["old"]


def test_failed_layers_are_soon_deleted() -> None:
    failed = layer("failed", phase=CheckpointPhase.FAILED, age=REPLACED_FOR * 2)
    assert deleted(failed) == ["failed"]


def test_a_team_keeps_a_limited_number_of_layers(monkeypatch) -> None:
    monkeypatch.setattr(retention, "LAYERS_KEPT", 2)
    layers = [layer(f"l{age}", age=timedelta(hours=age)) for age in range(4)]
    assert deleted(*layers) == ["l2", "l3"]
    assert deleted(*layers, templates=(template("l3"),)) == ["l2"]


def test_snapshots_of_users_are_not_layers() -> None:
    snapshot = Checkpoint(metadata=ObjectMeta(name="snap", namespace="red"))
    assert deleted(snapshot) == []


def test_the_last_builds_and_those_with_a_tag_are_kept() -> None:
    builds = [build(f"b{age}", age=age) for age in range(BUILDS_KEPT + 3)]
    old = [f"b{BUILDS_KEPT}", f"b{BUILDS_KEPT + 1}", f"b{BUILDS_KEPT + 2}"]
    assert [one.metadata.name for one in unneeded_builds(builds, ())] == old
    tagged = template(None, old[1])
    assert [one.metadata.name for one in unneeded_builds(builds, (tagged,))] == [old[0], old[2]]


def test_failed_builds_and_those_with_other_tags_replace_no_rollback_target() -> None:
    targets = [build(f"b{age}", age=90 + age) for age in range(BUILDS_KEPT)]
    failed = [build(f"f{age}", age=age, phase=BuildPhase.FAILED) for age in range(BUILDS_KEPT)]
    staged = [build("stage", age=50, tags=("stage-1",))]
    found = unneeded_builds([*targets, *failed, *staged], ())
    assert [one.metadata.name for one in found] == ["stage"]
