"""Which build a tag stands for."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from paddock.resources.kinds.template import TemplateTag
from paddock.resources.kinds.template_build import (
    BuildPhase,
    TemplateBuild,
    TemplateBuildSpec,
    TemplateBuildStatus,
)
from paddock.resources.meta import ObjectMeta
from paddock.resources.template_references import object_name, parse_reference
from paddock.resources.transitions.template_tags import (
    assigned,
    build_of,
    effective,
    is_superseded,
    share_tag,
    without,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ID = "5f0c1f5e-7d0c-4f61-9a44-5a7d3f1f6f2e"


def build(name: str, phase: BuildPhase = BuildPhase.READY, *tags: str) -> TemplateBuild:
    return TemplateBuild(
        metadata=ObjectMeta(name=name, namespace="red"),
        spec=TemplateBuildSpec(template_name="t", tags=tags),
        status=TemplateBuildStatus(phase=phase),
    )


def history(*pairs: tuple[str, str]) -> tuple[TemplateTag, ...]:
    return tuple(
        TemplateTag(tag=tag, build=name, assigned_at=NOW + timedelta(seconds=number))
        for number, (tag, name) in enumerate(pairs)
    )


def named(*builds: TemplateBuild) -> dict[str, TemplateBuild]:
    return {item.metadata.name: item for item in builds}


def test_the_newest_assignment_whose_build_is_ready_counts() -> None:
    tags = history(("v1", "one"), ("v1", "two"), ("v1", "three"))
    builds = named(build("one"), build("two"), build("three", BuildPhase.BUILDING))
    assert build_of(tags, "v1", builds) is builds["two"]
    assert build_of(tags, "v2", builds) is None


def test_a_build_can_be_named_by_its_id_without_a_tag() -> None:
    builds = named(build(ID))
    assert build_of((), ID, builds) is builds[ID]
    assert build_of((), ID, named(build(ID, BuildPhase.FAILED))) is None


def test_assignments_that_cannot_count_again_are_dropped() -> None:
    tags = history(("v1", "one"), ("v1", "two"), ("v1", "failed"), ("v2", "gone"), ("v1", "busy"))
    builds = named(
        build("one"),
        build("two"),
        build("failed", BuildPhase.FAILED),
        build("busy", BuildPhase.BUILDING),
        build("new", BuildPhase.WAITING),
    )
    found = assigned(tags, ["v1", "v3"], "new", builds, now=NOW)
    assert [(item.tag, item.build) for item in found] == [
        ("v1", "two"),
        ("v1", "busy"),
        ("v1", "new"),
        ("v3", "new"),
    ]


def test_a_removed_tag_stands_for_nothing() -> None:
    tags = history(("v1", "one"), ("v2", "one"))
    assert [item.tag for item in without(tags, ["v1"])] == ["v2"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["r1", "r2", "w", "f"]))))
def test_pruning_changes_no_tag(pairs: list[tuple[str, str]]) -> None:
    builds = named(
        build("r1"), build("r2"), build("w", BuildPhase.WAITING), build("f", BuildPhase.FAILED)
    )
    tags: tuple[TemplateTag, ...] = ()
    for tag, name in pairs:
        tags = assigned(tags, [tag], name, builds, now=NOW)
    whole = history(*pairs)
    for tag in "abc":
        assert build_of(tags, tag, builds) == build_of(whole, tag, builds)
    # A build that waits and becomes ready later counts from its own assignment on.
    later = {**builds, "w": build("w")}
    for tag in "abc":
        assert build_of(tags, tag, later) == build_of(whole, tag, later)
    assert {item.tag for item in effective(tags, builds)} == {
        tag for tag in "abc" if build_of(whole, tag, builds)
    }


def test_builds_without_tags_share_the_tag_default() -> None:
    assert share_tag(build("a"), build("b", BuildPhase.WAITING, "default"))
    assert not share_tag(build("a"), build("b", BuildPhase.WAITING, "v1"))


def test_a_reference_has_a_team_a_name_and_a_tag() -> None:
    assert parse_reference("Red/my_App:v1") == ("red", "my_app", "v1")
    assert parse_reference("app") == ("", "app", "default")
    assert parse_reference(f"app:{ID}") == ("", "app", ID)
    assert parse_reference("red/_app-") == ("red", "_app-", "default")
    for text in ("", ":v1", "app:", "a b", "/app", "a/b/c", "app\n", ".app"):
        assert parse_reference(text) is None, text


@given(st.from_regex(r"[a-z0-9_-]{1,128}", fullmatch=True))
def test_every_alias_has_an_object_name_that_is_a_dns_label(alias: str) -> None:
    name = object_name(alias)
    assert 0 < len(name) <= 63
    assert name.replace("-", "a").isalnum()
    assert name[0] != "-" != name[-1]
    assert name == object_name(alias)
    if "_" not in alias and len(alias) <= 63 and alias.strip("-") == alias:
        assert name == alias


def test_a_later_default_replaces_a_build_only_if_it_is_ready() -> None:
    declared = build("declared", BuildPhase.BUILDING)
    declared = structs.replace(
        declared, metadata=structs.replace(declared.metadata, creation_timestamp=NOW)
    )
    ready = structs.replace(declared, status=TemplateBuildStatus(phase=BuildPhase.READY))
    earlier = history(("default", "other"))
    later = history(("x", "y"), ("default", "other"))
    assert not is_superseded(earlier, ready, named(build("other"), declared))
    assert is_superseded(later, ready, named(build("other"), declared))
    running = named(build("other", BuildPhase.BUILDING), declared)
    assert not is_superseded(later, ready, running)
    requested = history(("default", "other"), ("default", "declared"))
    assert not is_superseded(requested, ready, named(build("other"), declared))
