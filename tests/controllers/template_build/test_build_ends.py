"""Ends of builds: what is written, whatever happens meanwhile, in virtual time."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec import structs

from paddock.controllers.template_build import layers
from paddock.kit.errors import ConflictError, NotFoundError, UnavailableError
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.template import SandboxTemplate, TemplateTag
from paddock.resources.kinds.template_build import LABEL_LAYER, BuildPhase, BuildStep, TemplateBuild
from paddock.resources.meta import Key, Resource
from tests.controllers.template_build.shell import FakeShell, Reply
from tests.controllers.template_build.test_builds import Factory, in_a_world
from tests.scenario.paddock import paddock

pytestmark = pytest.mark.looptime
TEMPLATE = Key("default", "t")


def template(factory: Factory) -> SandboxTemplate:
    found = factory.world.provider.get(SandboxTemplate, TEMPLATE)
    assert found is not None
    return found


async def assign_default(factory: Factory, build: TemplateBuild) -> None:
    """Set the default of the template to a build from now on."""
    tag = TemplateTag(
        tag="default", build=build.metadata.name, assigned_at=factory.world.plane.clock.now()
    )
    await factory.world.provider.write.mutate(
        SandboxTemplate,
        TEMPLATE,
        lambda now: structs.replace(
            now, status=structs.replace(now.status, tags=(*now.status.tags, tag))
        ),
        is_status=True,
    )


@in_a_world
async def test_a_build_of_a_template_that_does_not_exist_fails_with_the_reason(
    factory: Factory,
) -> None:
    ended = await factory.build("one", template="none")
    assert ended.status.phase is BuildPhase.FAILED
    assert ended.status.message == (
        "template 'none' of the build does not exist: create the SandboxTemplate 'none'"
    )
    assert factory.shell.texts == []


@in_a_world
async def test_a_template_that_is_deleted_during_its_build_fails_only_that_build(
    factory: Factory,
) -> None:
    await factory.template("other")
    factory.shell.script({"slow": Reply(seconds=50), "longer": Reply(seconds=90)})
    other = await factory.start("longer", template="other")
    build = await factory.start("slow")
    await factory.world.until(lambda: {"slow", "longer"} <= set(factory.shell.texts))
    await factory.world.provider.write.delete(template(factory))
    ended = await factory.end(build)
    assert (ended.status.phase, ended.status.failed_step) == (BuildPhase.FAILED, "finalize")
    assert "template 't' of the build does not exist" in ended.status.message
    assert (await factory.end(other)).status.phase is BuildPhase.READY
    assert factory.shell.texts.count("longer") == 1


@pytest.mark.parametrize("error", [UnavailableError("the store restarts"), ConflictError("again")])
@pytest.mark.parametrize("status", [0, 1])
async def test_an_end_that_cannot_be_written_is_written_later(
    tmp_path: Path, error: Exception, status: int
) -> None:
    shell = FakeShell()
    shell.script({"one": Reply(status=status, seconds=5)})
    async with paddock(pool_size=0, build_shell=shell, state_dir=str(tmp_path)) as world:
        factory = Factory(world, shell)
        await factory.template()
        write = world.store.update_status
        failures = [error] * 30

        async def failing(obj: Resource) -> Resource:
            if isinstance(obj, TemplateBuild) and obj.status.completion_time and failures:
                raise failures.pop()
            return await write(obj)

        world.store.update_status = failing  # type: ignore[method-assign]
        ended = await factory.build("one")
        assert failures == []
        assert ended.status.phase is (BuildPhase.FAILED if status else BuildPhase.READY)
        assert shell.texts == ["one"]
        messages = await factory.messages(ended)
        assert len([text for text in messages if "exit status" in text]) == status


@in_a_world
async def test_a_failure_is_recorded_while_the_disk_has_no_room_for_its_log(
    factory: Factory,
) -> None:
    files = factory.world.plane.assembly.build_files
    assert files is not None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    files.logs._write = full  # type: ignore[method-assign]
    factory.shell.script({"one": Reply(status=3)})
    ended = await factory.build("one")
    assert "exit status 3" in ended.status.message


@in_a_world
async def test_a_build_that_is_canceled_while_its_result_is_written_is_ready(
    factory: Factory,
) -> None:
    world = factory.world
    write = world.store.update_status
    canceled = asyncio.Event()

    async def slow(obj: Resource) -> Resource:
        if isinstance(obj, SandboxTemplate) and obj.status.build:
            # Between the template and the build.
            now = factory.now(build)
            canceled_now = structs.replace(now.spec, canceled="by a test")
            await world.provider.write.update(structs.replace(now, spec=canceled_now))
            canceled.set()
            await asyncio.sleep(3)
        return await write(obj)

    world.store.update_status = slow  # type: ignore[method-assign]
    build = await factory.start("one")
    ended = await factory.end(build)
    assert canceled.is_set()
    assert ended.status.phase is BuildPhase.READY
    assert template(factory).status.build == ended.metadata.name
    await asyncio.sleep(10)
    assert factory.now(build).status.phase is BuildPhase.READY


@in_a_world
async def test_a_rollback_during_a_build_stays(factory: Factory) -> None:
    first = await factory.build("one")
    factory.shell.script({"slow": Reply(seconds=50)})
    build = await factory.start("slow")
    await factory.world.until(lambda: "slow" in factory.shell.texts)
    await assign_default(factory, first)
    ended = await factory.end(build)
    assert ended.status.phase is BuildPhase.READY
    assert template(factory).spec.restore_from == first.status.checkpoint_id
    assert template(factory).status.build == first.metadata.name


async def test_of_two_waiting_builds_one_takes_the_only_free_place(tmp_path: Path) -> None:
    shell = FakeShell()
    shell.script({"slow": Reply(seconds=50), "a": Reply(seconds=50), "b": Reply(seconds=50)})
    async with paddock(
        pool_size=0, build_shell=shell, state_dir=str(tmp_path), template_builds_per_team=1
    ) as world:
        factory = Factory(world, shell)
        await factory.template()
        write = world.store.update_status

        async def slowly(obj: Resource) -> Resource:
            await asyncio.sleep(0.5)
            return await write(obj)

        slow = await factory.start("slow")
        await world.until(lambda: "slow" in shell.texts)
        waiting = [await factory.start("a"), await factory.start("b")]
        world.store.update_status = slowly  # type: ignore[method-assign]
        await factory.end(slow)
        await asyncio.sleep(20)
        phases = sorted(factory.now(build).status.phase for build in waiting)
        assert phases == [BuildPhase.BUILDING, BuildPhase.WAITING]
        for build in waiting:
            assert (await factory.end(build)).status.phase is BuildPhase.READY


# ---- progress --------------------------------------------------------------------------------


@in_a_world
async def test_a_forced_build_continues_at_the_last_layer_that_it_stored_itself(
    factory: Factory,
) -> None:
    await factory.build("one", "two")
    factory.shell.commands.clear()
    factory.shell.script({"two": Reply(error=UnavailableError("the node was restarted"))})
    ended = await factory.build("one", "two", force=True)
    assert ended.status.phase is BuildPhase.READY
    assert factory.shell.texts == ["one", "two", "two"]


@in_a_world
async def test_a_build_with_a_forced_step_uses_stored_layers_only_before_it(
    factory: Factory,
) -> None:
    await factory.build("one", "two")
    factory.shell.commands.clear()
    steps = (BuildStep(type="RUN", args=("one",)), BuildStep(type="RUN", args=("two",), force=True))
    await factory.build(steps=steps)
    assert factory.shell.texts == ["two"]


@in_a_world
async def test_each_step_may_fail_as_long_as_the_machine_does_in_between(
    factory: Factory,
) -> None:
    steps = [f"step {number}" for number in range(4)]
    for text in steps:
        for _ in range(3):
            factory.shell.script({text: Reply(error=UnavailableError("restart"), seconds=6)})
    ended = await factory.build(*steps)
    assert ended.status.phase is BuildPhase.READY


@in_a_world
async def test_a_layer_that_was_deleted_a_moment_ago_is_stored_again(factory: Factory) -> None:
    world = factory.world
    await factory.build("one")
    [layer] = [one for one in world.provider.all(Checkpoint) if LABEL_LAYER in one.metadata.labels]
    get = world.store.get

    async def deleted(kind: type[Resource], key: Key) -> Resource:
        if key == layer.key:
            raise NotFoundError("it was deleted")
        return await get(kind, key)

    factory.shell.commands.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layers, "MARK_AFTER", timedelta())
        patched.setattr(world.store, "get", deleted)
        ended = await factory.build("one")
    assert (ended.status.phase, factory.shell.texts) == (BuildPhase.READY, ["one"])
