"""What the sweep deletes while other writers change the same objects, in virtual time."""

from typing import Any

import pytest

from paddock.controllers.template_build import retention
from paddock.kit.errors import ConflictError
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Key, Resource
from tests.controllers.template_build.test_builds import Factory, in_a_world

pytestmark = pytest.mark.looptime


@in_a_world
async def test_a_build_that_changes_during_the_sweep_keeps_no_other_one(factory: Factory) -> None:
    world = factory.world
    count = retention.BUILDS_KEPT + 2
    builds = [await factory.build("one", tags=("v1",)) for _ in range(count)]
    changed, other = builds[1], builds[0]
    delete = world.store.delete

    async def refused(kind: type[Resource], key: Key, **options: Any) -> Resource:
        if key == changed.key:
            raise ConflictError("it was changed")
        return await delete(kind, key, **options)

    world.store.delete = refused  # type: ignore[method-assign]
    await world.until(lambda: world.provider.get(TemplateBuild, other.key) is None, seconds=300)
    assert world.provider.get(TemplateBuild, changed.key) is not None
