"""Builds on the simulated runtime, in virtual time: phases, cache, turns, failures, ends."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec import structs

from paddock.claims.quota.ledger import Dimension, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit import ids
from paddock.kit.errors import DiskFullError, InvalidError, NotFoundError, UnavailableError
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec, TemplateRef
from paddock.resources.kinds.template_build import (
    LABEL_BUILD,
    BuildPhase,
    BuildStep,
    TemplateBuild,
    TemplateBuildSpec,
)
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.simulated import ALL_CAPABILITIES, SimulatedRuntime
from paddock.runtime.simulated_operations import Operation
from tests.controllers.template_build.shell import FakeShell, Reply
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime
ENDED = (BuildPhase.READY, BuildPhase.FAILED)


class Factory:
    """Builds in one world."""

    def __init__(self, world: World, shell: FakeShell) -> None:
        self.world = world
        self.shell = shell

    async def template(self, name: str = "t", **spec: object) -> SandboxTemplate:
        meta = ObjectMeta(name=name, namespace="default")
        made = SandboxTemplateSpec(**spec)  # type: ignore[arg-type]
        return await self.world.store.create(SandboxTemplate(metadata=meta, spec=made))

    async def start(self, *steps: str, template: str = "t", **spec: object) -> TemplateBuild:
        """Write a build of RUN steps."""
        wanted = TemplateBuildSpec(
            template_name=template,
            started=True,
            owner="default",
            from_image="base",
            steps=tuple(BuildStep(type="RUN", args=(text,)) for text in steps),
        )
        meta = ObjectMeta(name=ids.uid(), namespace="default")
        spec_now = structs.replace(wanted, **spec)
        return await self.world.store.create(TemplateBuild(metadata=meta, spec=spec_now))

    async def end(self, build: TemplateBuild) -> TemplateBuild:
        """Wait for the end of a build."""
        async with asyncio.timeout(20_000):
            while self.now(build).status.phase not in ENDED:
                await asyncio.sleep(1)
        return self.now(build)

    async def build(self, *steps: str, **spec: object) -> TemplateBuild:
        return await self.end(await self.start(*steps, **spec))

    def now(self, build: TemplateBuild) -> TemplateBuild:
        found = self.world.provider.get(TemplateBuild, build.key)
        assert found is not None
        return found

    def sandboxes(self) -> list[Sandbox]:
        boxes = self.world.provider.all(Sandbox)
        return [box for box in boxes if LABEL_BUILD in box.metadata.labels]

    async def messages(self, build: TemplateBuild) -> list[str]:
        files = self.world.plane.assembly.build_files
        assert files is not None
        return [entry.message for entry in await files.logs.read(build.metadata.uid)]


def in_a_world(test: Callable[[Factory], Awaitable[None]]) -> Callable[[Path], Awaitable[None]]:
    """Run a test in a world with one template. Not a fixture: those are not on virtual time."""

    async def run(tmp_path: Path) -> None:
        shell = FakeShell()
        async with paddock(pool_size=0, build_shell=shell, state_dir=str(tmp_path)) as world:
            found = Factory(world, shell)
            await found.template()
            await test(found)

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    return run


@in_a_world
async def test_a_build_runs_its_steps_in_order_and_ends_without_a_sandbox(factory: Factory) -> None:
    ended = await factory.build("one", "two")
    assert (ended.status.phase, ended.status.step) == (BuildPhase.READY, 2)
    assert factory.shell.texts == ["one", "two"]
    await factory.world.until(lambda: not factory.sandboxes())


@in_a_world
async def test_a_ready_build_replaces_what_its_template_starts_from(factory: Factory) -> None:
    ended = await factory.build("one")
    template = factory.world.provider.get(SandboxTemplate, Key("default", "t"))
    assert template is not None
    assert template.spec.restore_from == ended.status.checkpoint_id != ""
    assert template.status.build == ended.metadata.name


@in_a_world
async def test_a_build_with_another_tag_leaves_the_template_alone(factory: Factory) -> None:
    ended = await factory.build("one", tags=("v1",))
    template = factory.world.provider.get(SandboxTemplate, Key("default", "t"))
    assert ended.status.checkpoint_id
    assert template is not None
    assert template.spec.restore_from is None


@in_a_world
async def test_a_build_whose_layers_are_all_stored_needs_no_sandbox(factory: Factory) -> None:
    first = await factory.build("one", start_command="serve", ready_command="ready")
    count = len(factory.shell.commands)
    again = await factory.build("one", start_command="serve", ready_command="ready")
    assert again.status.checkpoint_id == first.status.checkpoint_id
    assert len(factory.shell.commands) == count


@in_a_world
async def test_a_team_does_not_use_layers_of_another_one(factory: Factory) -> None:
    await factory.build("one")
    other = await factory.build("one", owner="blue")
    assert other.status.cached_steps == 0


async def test_further_builds_of_a_team_wait_for_their_turn(tmp_path: Path) -> None:
    shell = FakeShell()
    shell.script({"slow": Reply(seconds=50)})
    async with paddock(
        pool_size=0, build_shell=shell, state_dir=str(tmp_path), template_builds_per_team=1
    ) as world:
        factory = Factory(world, shell)
        await factory.template()
        slow = await factory.start("slow")
        await world.until(lambda: "slow" in shell.texts)
        second = await factory.start("fast")
        other = await factory.build("other", owner="blue")
        assert other.status.phase is BuildPhase.READY
        assert factory.now(second).status.phase is BuildPhase.WAITING
        await factory.end(slow)
        assert (await factory.end(second)).status.phase is BuildPhase.READY


@in_a_world
async def test_a_failure_of_the_machine_continues_at_the_last_layer(factory: Factory) -> None:
    factory.shell.script({"two": Reply(error=UnavailableError("the node was restarted"))})
    ended = await factory.build("one", "two")
    assert ended.status.phase is BuildPhase.READY
    assert factory.shell.texts == ["one", "two", "two"]
    assert factory.shell.sandboxes[1] != factory.shell.sandboxes[2]


@in_a_world
async def test_a_machine_that_keeps_failing_ends_the_build_with_the_reason(
    factory: Factory,
) -> None:
    for _ in range(30):
        factory.shell.script({"one": Reply(error=UnavailableError("the node is down"))})
    ended = await factory.build("one")
    assert (ended.status.phase, ended.status.message) == (BuildPhase.FAILED, "the node is down")


@in_a_world
async def test_an_image_that_is_missing_fails_the_base_with_the_reason(factory: Factory) -> None:
    error = NotFoundError("image 'none:1' not found: manifest unknown")
    factory.world.runtime.fail_next(Operation.ENSURE_IMAGE, error)
    ended = await factory.build("one", from_image="none:1")
    assert (ended.status.failed_step, ended.status.message) == ("base", error.message)


@in_a_world
async def test_a_full_disk_is_not_retried(factory: Factory) -> None:
    factory.shell.script({"one": Reply(error=DiskFullError("no space"))})
    ended = await factory.build("zero", "one")
    assert (ended.status.failed_step, ended.status.message) == ("2", "no space")
    assert factory.shell.texts == ["zero", "one"]


@in_a_world
async def test_whatever_fails_at_a_step_names_the_step(factory: Factory) -> None:
    errors = (InvalidError("refused"), RuntimeError("a bug"))
    for number, error in enumerate(errors):
        factory.shell.script({f"two {number}": Reply(error=error)})
        ended = await factory.build("one", f"two {number}")
        assert (ended.status.phase, ended.status.failed_step) == (BuildPhase.FAILED, "2")
    factory.shell.script({"ready": Reply(error=InvalidError("refused"))})
    ended = await factory.build("one", ready_command="ready")
    assert ended.status.failed_step == "finalize"


@in_a_world
async def test_a_machine_that_fails_during_the_start_command_is_tried_again(
    factory: Factory,
) -> None:
    lost = UnavailableError("the node was restarted")
    factory.shell.script({"serve": Reply(error=lost, seconds=3)})
    factory.shell.replies["ready"] = [Reply(status=1)] * 5
    ended = await factory.build("one", start_command="serve", ready_command="ready")
    assert ended.status.phase is BuildPhase.READY
    assert factory.shell.texts.count("serve") == 2


@in_a_world
async def test_a_start_command_that_fails_before_it_is_ready_fails_the_build(
    factory: Factory,
) -> None:
    factory.shell.script({"serve": Reply(status=7, seconds=3)})
    for _ in range(9):
        factory.shell.script({"ready": Reply(status=1)})
    ended = await factory.build(start_command="serve", ready_command="ready")
    assert ended.status.failed_step == "finalize"
    assert "exit status 7" in ended.status.message


@in_a_world
async def test_a_template_that_never_becomes_ready_fails_after_ten_minutes(
    factory: Factory,
) -> None:
    factory.shell.script({"serve": Reply(seconds=9000)})
    factory.shell.replies["ready"] = [Reply(status=1)] * 1000
    ended = await factory.build(start_command="serve", ready_command="ready")
    assert "did not exit with 0 within 600 s" in ended.status.message


async def test_a_build_that_takes_too_long_ends(tmp_path: Path) -> None:
    shell = FakeShell()
    shell.script({"slow": Reply(seconds=9000)})
    async with paddock(
        pool_size=0, build_shell=shell, state_dir=str(tmp_path), template_build_seconds=60
    ) as world:
        factory = Factory(world, shell)
        await factory.template()
        ended = await factory.build("slow")
        assert "longer than its limit" in ended.status.message
        await world.until(lambda: not factory.sandboxes())


@in_a_world
async def test_a_deleted_build_leaves_neither_sandbox_nor_log(factory: Factory) -> None:
    factory.shell.script({"slow": Reply(seconds=900)})
    build = await factory.start("slow")
    await factory.world.until(lambda: "slow" in factory.shell.texts)
    await factory.world.provider.write.delete(build)
    await factory.world.until(
        lambda: not factory.world.provider.all(TemplateBuild) and not factory.sandboxes()
    )
    assert await factory.messages(build) == []


@in_a_world
async def test_clients_do_not_see_sandboxes_of_builds(factory: Factory) -> None:
    factory.shell.script({"slow": Reply(seconds=900)})
    await factory.start("slow")
    await factory.world.until(lambda: "slow" in factory.shell.texts)
    listed = await factory.world.http.get("/v2/sandboxes")
    assert listed.json() == []
    [box] = factory.sandboxes()
    assert box.spec.claim is not None
    found = await factory.world.http.get(f"/sandboxes/{box.spec.claim.sandbox_id}")
    assert found.status_code == 404


@in_a_world
async def test_sandboxes_of_builds_count_for_the_quota_of_their_team(factory: Factory) -> None:
    factory.shell.script({"slow": Reply(seconds=900)})
    await factory.start("slow")
    await factory.world.until(lambda: "slow" in factory.shell.texts)
    [box] = factory.sandboxes()
    assert box.spec.claim is not None
    assert (box.spec.claim.owner, box.metadata.namespace) == ("default", "default")
    used = factory.world.plane.ledger.used
    assert used("team:default", Dimension.COUNT, QuotaScope.ALL) == 1


async def test_a_runtime_that_cannot_store_files_refuses_with_the_reason(tmp_path: Path) -> None:
    runtime = SimulatedRuntime(
        capabilities=structs.replace(ALL_CAPABILITIES, can_snapshot_files=False)
    )
    shell = FakeShell()
    async with paddock(
        pool_size=0, runtime=runtime, build_shell=shell, state_dir=str(tmp_path)
    ) as world:
        factory = Factory(world, shell)
        await factory.template()
        ended = await factory.build("one")
        assert "cannot store files of sandboxes" in ended.status.message


# ---- templates that start from a checkpoint --------------------------------------------------


@in_a_world
async def test_pools_of_a_built_template_roll_and_start_from_its_checkpoint(
    factory: Factory,
) -> None:
    world = factory.world
    meta = ObjectMeta(name="t", namespace="default")
    spec = SandboxPoolSpec(replicas=2, template_ref=TemplateRef(name="t"))
    await world.store.create(SandboxPool(metadata=meta, spec=spec))
    await world.stocked(2, "t")
    ended = await factory.build("one")
    layer = world.provider.checkpoint(ended.status.checkpoint_id)
    assert layer is not None

    def rolled() -> bool:
        members = [
            box
            for box in world.provider.all(Sandbox)
            if box.metadata.labels.get("paddock.dev/pool") == "t"
        ]
        starts = {box.spec.template and box.spec.template.restore_from for box in members}
        return len(members) == 2 and starts == {ended.status.checkpoint_id}

    await world.until(rolled, seconds=600)
    await world.stocked(2, "t")


@in_a_world
async def test_a_claim_of_a_built_template_starts_from_its_checkpoint(factory: Factory) -> None:
    ended = await factory.build("one")
    box = await factory.world.manager.claims.create(CALLER, NewSandbox(template="t"))
    layer = factory.world.provider.checkpoint(ended.status.checkpoint_id)
    assert layer is not None
    used = factory.world.runtime.blueprint(box.metadata.uid)
    assert used.checkpoint_id == layer.metadata.uid


async def test_an_image_cannot_be_chosen_for_a_built_template(tmp_path: Path) -> None:
    shell = FakeShell()
    async with paddock(
        pool_size=0, build_shell=shell, state_dir=str(tmp_path), claim_images="*"
    ) as world:
        factory = Factory(world, shell)
        await factory.template()
        await factory.build("one")
        with pytest.raises(InvalidError, match="it starts from its build"):
            await world.manager.claims.create(CALLER, NewSandbox(template="t", image="other"))


@in_a_world
async def test_a_template_cannot_start_from_a_checkpoint_of_another_team(factory: Factory) -> None:
    ended = await factory.build("one")
    meta = ObjectMeta(name="thief", namespace="blue")
    spec = SandboxTemplateSpec(restore_from=ended.status.checkpoint_id, public=True)
    await factory.world.store.create(SandboxTemplate(metadata=meta, spec=spec))
    current = factory.world.provider.get(SandboxTemplate, Key("default", "t"))
    assert current is not None
    private = structs.replace(current, spec=structs.replace(current.spec, public=False))
    await factory.world.provider.write.update(private)
    with pytest.raises((NotFoundError, UnavailableError), match="was not found"):
        await factory.world.manager.claims.create(
            structs.replace(CALLER, team="blue"), NewSandbox(template="thief")
        )


@in_a_world
async def test_a_checkpoint_is_kept_until_no_template_starts_from_it(factory: Factory) -> None:
    world = factory.world
    ended = await factory.build("one")
    layer = world.provider.checkpoint(ended.status.checkpoint_id)
    assert layer is not None
    await world.provider.write.delete(layer)
    await world.until(lambda: any(one.is_deleting for one in world.provider.all(Checkpoint)))
    box = await world.manager.claims.create(CALLER, NewSandbox(template="t"))
    assert box.spec.claim is not None
    template = world.provider.get(SandboxTemplate, Key("default", "t"))
    assert template is not None
    await world.provider.write.delete(template)
    await world.until(lambda: layer.key not in {one.key for one in world.provider.all(Checkpoint)})
