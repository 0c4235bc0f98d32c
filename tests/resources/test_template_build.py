"""A template after a build of it."""

import pytest
from msgspec import structs

from paddock.resources.kinds.template import (
    NetworkPolicy,
    Privileges,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.kinds.template_build import (
    TemplateBuild,
    TemplateBuildSpec,
    TemplateBuildStatus,
)
from paddock.resources.transitions.template_build import is_default, with_build

CLOSED = NetworkPolicy(allow_internet_access=False)
BUILT = SandboxTemplateSpec(
    image="python", restore_from="layer1", env={"A": "b"}, user="ana", network=CLOSED
)
TEMPLATE = SandboxTemplate(
    spec=SandboxTemplateSpec(image="old", aliases=("one",), public=False, description="mine")
)


def build(*, built: SandboxTemplateSpec | None = BUILT, **spec: object) -> TemplateBuild:
    return TemplateBuild(
        spec=TemplateBuildSpec(template_name="t", **spec),  # type: ignore[arg-type]
        status=TemplateBuildStatus(template=built),
    )


def test_the_result_replaces_what_sandboxes_start_from() -> None:
    spec = with_build(TEMPLATE, build(from_image="python")).spec
    assert (spec.image, spec.restore_from, spec.user) == ("python", "layer1", "ana")
    assert spec.env == {"A": "b"}


def test_names_visibility_and_network_of_the_template_stay() -> None:
    spec = with_build(TEMPLATE, build(from_image="python")).spec
    assert (spec.aliases, spec.public, spec.description) == (("one",), False, "mine")
    assert spec.network == TEMPLATE.spec.network


def test_a_template_built_from_another_one_keeps_its_network_policy() -> None:
    assert with_build(TEMPLATE, build(from_template="other")).spec.network == CLOSED


def test_a_build_without_result_changes_nothing() -> None:
    assert with_build(TEMPLATE, build(built=None)) == TEMPLATE


def test_builds_with_other_tags_leave_the_template_as_it_is() -> None:
    assert is_default(build())
    assert is_default(build(tags=("v1", "default")))
    assert not is_default(build(tags=("v1",)))


@pytest.mark.parametrize("locked", ["template", "build"])
def test_a_rebuild_keeps_the_stricter_privileges(locked: str) -> None:
    locked_spec = SandboxTemplateSpec(privileges=Privileges.LOCKED)
    template = SandboxTemplate(spec=locked_spec) if locked == "template" else TEMPLATE
    built = locked_spec if locked == "build" else BUILT
    spec = with_build(template, build(built=built)).spec
    assert spec.privileges is Privileges.LOCKED


def test_a_rebuild_changes_the_size_and_no_other_limit() -> None:
    limits = Resources(cpu="1", memory="1Gi", disk="2Gi", pids=50, egress_bandwidth="1M")
    template = structs.replace(TEMPLATE, spec=structs.replace(TEMPLATE.spec, resources=limits))
    built = structs.replace(BUILT, resources=Resources(cpu="4", memory="4Gi"))
    assert with_build(template, build(built=built)).spec.resources == structs.replace(
        limits, cpu="4", memory="4Gi"
    )


def test_a_build_from_an_open_template_does_not_open_a_closed_one() -> None:
    closed = structs.replace(TEMPLATE, spec=structs.replace(TEMPLATE.spec, network=CLOSED))
    built = structs.replace(BUILT, network=NetworkPolicy(allow_private_networks=True))
    spec = with_build(closed, build(built=built, from_template="open")).spec
    assert (spec.network.allow_internet_access, spec.network.allow_private_networks) == (
        False,
        False,
    )


def test_a_pinned_version_of_the_former_image_does_not_stay() -> None:
    pinned = structs.replace(
        TEMPLATE, spec=structs.replace(TEMPLATE.spec, image_digest="sha256:" + "a" * 64)
    )
    assert with_build(pinned, build(from_image="python")).spec.image_digest is None
