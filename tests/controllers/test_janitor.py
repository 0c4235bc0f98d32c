"""What the janitor keeps."""

from collections.abc import Sequence
from typing import Any

import pytest

from paddock.controllers.janitor import needed_images
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.kinds.template_build import (
    BuildPhase,
    TemplateBuild,
    TemplateBuildSpec,
    TemplateBuildStatus,
)
from paddock.resources.meta import ObjectMeta, Resource

DIGEST = "sha256:" + "0" * 64


class Objects:
    """A provider of the given objects."""

    def __init__(self, *objects: Resource) -> None:
        self._objects = objects

    def all(self, kind: type[Resource]) -> Sequence[Resource]:
        return [one for one in self._objects if isinstance(one, kind)]


@pytest.mark.parametrize("digest", [None, DIGEST])
def test_the_images_of_builds_are_needed_whatever_their_template_names(digest: str | None) -> None:
    meta = ObjectMeta(name="t", namespace="red")
    template = SandboxTemplate(metadata=meta, spec=SandboxTemplateSpec(image="new"))
    spec = SandboxTemplateSpec(image="registry.example/private", image_digest=digest)
    build = TemplateBuild(metadata=meta, status=TemplateBuildStatus(template=spec))
    unfinished = TemplateBuild(metadata=meta)
    provider: Any = Objects(template, build, unfinished)
    pinned = {f"registry.example/private@{digest}"} if digest else set()
    assert needed_images(provider) == {"new", "registry.example/private", *pinned}


def test_the_base_of_a_build_is_needed_until_it_has_ended() -> None:
    spec = TemplateBuildSpec(template_name="t", from_image="python:3.13")
    for phase, needed in ((BuildPhase.BUILDING, {"python:3.13"}), (BuildPhase.FAILED, set())):
        status = TemplateBuildStatus(phase=phase)
        meta = ObjectMeta(name="t", namespace="red")
        provider: Any = Objects(TemplateBuild(metadata=meta, spec=spec, status=status))
        assert needed_images(provider) == needed


def test_the_image_of_a_template_is_needed_unless_it_starts_from_a_checkpoint() -> None:
    for checkpoint, needed in ((None, {"python:3.13"}), ("checkpoint", set())):
        spec = SandboxTemplateSpec(image="python:3.13", restore_from=checkpoint)
        meta = ObjectMeta(name="t", namespace="red")
        provider: Any = Objects(
            SandboxTemplate(metadata=meta, spec=spec),
            Sandbox(metadata=meta, spec=SandboxSpec(template=spec)),
        )
        assert needed_images(provider) == needed
