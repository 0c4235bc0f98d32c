"""The image below a build: which version of it is used, and where that is recorded."""

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.controllers.pool.factory import revision
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import SandboxTemplate, TemplateRef
from paddock.resources.kinds.template_build import BuildPhase
from paddock.resources.meta import Key, ObjectMeta
from tests.controllers.template_build.test_builds import Factory, in_a_world
from tests.scenario.paddock import CALLER

pytestmark = pytest.mark.looptime
IMAGE = "registry.example/python:3.13"
ONE, TWO = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def template_of(factory: Factory, name: str = "t") -> SandboxTemplate:
    found = factory.world.provider.get(SandboxTemplate, Key("default", name))
    assert found is not None
    return found


@in_a_world
async def test_a_forced_build_asks_the_registry_for_the_image_again(factory: Factory) -> None:
    images = factory.world.runtime.images
    images.publish(IMAGE, ONE)
    first = await factory.build("one", from_image=IMAGE)
    images.publish(IMAGE, TWO)
    cached = await factory.build("one", from_image=IMAGE)
    forced = await factory.build("one", from_image=IMAGE, force=True)
    found = [build.status.image_digest for build in (first, cached, forced)]
    assert found == [ONE, ONE, TWO]


@in_a_world
async def test_a_step_that_is_forced_alone_keeps_the_image(factory: Factory) -> None:
    images = factory.world.runtime.images
    images.publish(IMAGE, ONE)
    first = await factory.build("one", from_image=IMAGE)
    images.publish(IMAGE, TWO)
    steps = tuple(structs.replace(step, force=True) for step in first.spec.steps)
    again = await factory.build(from_image=IMAGE, steps=steps)
    assert (again.status.image_digest, again.status.cached_steps) == (ONE, 0)


@in_a_world
async def test_a_build_without_steps_pins_its_image_before_the_first_sandbox(
    factory: Factory,
) -> None:
    world = factory.world
    world.runtime.images.publish(IMAGE, ONE)
    await factory.build(from_image=IMAGE)
    assert template_of(factory).spec.image_digest == ONE
    world.runtime.images.publish(IMAGE, TWO)
    await world.runtime.ensure_image(IMAGE, team="other")
    box = await world.manager.claims.create(CALLER, NewSandbox(template="t"))
    assert world.runtime.blueprint(box.metadata.uid).image_digest == ONE


@in_a_world
async def test_a_template_names_digest_build_and_revision(factory: Factory) -> None:
    factory.world.runtime.images.publish(IMAGE, ONE)
    await factory.world.until(lambda: bool(template_of(factory).status.revision))
    before = template_of(factory).status.revision
    built = await factory.build("one", from_image=IMAGE)
    await factory.world.until(lambda: template_of(factory).status.revision != before)
    template = template_of(factory)
    status = template.status
    assert (status.build, status.image, status.image_digest) == (built.metadata.name, IMAGE, ONE)
    assert status.revision == revision(template.spec)
    assert status.observed_generation == template.metadata.generation


@in_a_world
async def test_the_revision_of_a_template_is_that_of_its_pool(factory: Factory) -> None:
    world = factory.world
    spec = SandboxPoolSpec(replicas=1, template_ref=TemplateRef(name="t"))
    pool = SandboxPool(metadata=ObjectMeta(name="t", namespace="default"), spec=spec)
    await world.store.create(pool)
    await world.stocked(1, "t")
    before = world.pool("t").status.revision
    assert template_of(factory).status.revision == before
    await factory.build("one")
    await world.until(lambda: world.pool("t").status.revision not in ("", before), seconds=600)
    await world.until(
        lambda: template_of(factory).status.revision == world.pool("t").status.revision
    )


@in_a_world
async def test_what_was_never_built_has_no_revision(factory: Factory) -> None:
    made = await factory.world.http.post("/v3/templates", json={"name": "fresh"})
    assert made.status_code == 202
    key = Key("default", made.json()["templateID"])
    registered = factory.world.provider.get(SandboxTemplate, key)
    assert registered is not None
    await factory.world.until(lambda: template_of(factory, key.name).status.observed_generation > 0)
    assert template_of(factory, key.name).status.revision == ""


@in_a_world
async def test_a_rollback_names_the_image_of_the_earlier_build(factory: Factory) -> None:
    images = factory.world.runtime.images
    images.publish(IMAGE, ONE)
    first = await factory.build("one", from_image=IMAGE, tags=("default", "v1"))
    assert first.status.phase is BuildPhase.READY
    images.publish(IMAGE, TWO)
    await factory.build("one", from_image=IMAGE, force=True)
    assert template_of(factory).status.image_digest == TWO
    body = {"target": f"t:{first.metadata.name}", "tags": ["default"]}
    assert (await factory.world.http.post("/templates/tags", json=body)).status_code == 201
    status = template_of(factory).status
    assert (status.build, status.image_digest) == (first.metadata.name, ONE)
