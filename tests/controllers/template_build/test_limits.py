"""What builds may not start from, and what they do not take over or drop."""

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from paddock.claims.caller import Caller
from paddock.claims.template_resolver import TemplateResolver
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Outbound,
    Privileges,
    SandboxTemplate,
    SandboxTemplateSpec,
    Volume,
)
from paddock.resources.kinds.template_build import BuildPhase, BuildStep, TemplateBuild
from paddock.resources.meta import Key, ObjectMeta
from tests.controllers.template_build.shell import FakeShell, Reply
from tests.controllers.template_build.test_builds import Factory, in_a_world
from tests.scenario.paddock import paddock

pytestmark = pytest.mark.looptime
CLOSED = NetworkPolicy(allow_internet_access=False)


def variables(*args: str, kind: str = "ENV") -> tuple[BuildStep, ...]:
    return (BuildStep(type=kind, args=args),)


@in_a_world
async def test_names_that_a_template_cannot_have_fail_the_step(factory: Factory) -> None:
    for name in ("MY-VAR", "1ST", "", "A=B"):
        ended = await factory.build(steps=variables(name, "s3cr3t"))
        assert (ended.status.phase, ended.status.failed_step) == (BuildPhase.FAILED, "1")
        assert "is not a valid variable name" in ended.status.message
        assert "s3cr3t" not in ended.status.message


@pytest.mark.parametrize("kind", ["ENV", "ARG"])
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("A", "x" * 70_000, "B", "x" * 70_000), "more than 128 KiB in total"),
        (tuple(f"V{at // 2}" for at in range(1028)), "more than 512 variables"),
    ],
)
async def test_more_variables_than_can_be_stored_fail_the_step(
    tmp_path: Path, kind: str, args: tuple[str, ...], reason: str
) -> None:
    shell = FakeShell()
    async with paddock(pool_size=0, build_shell=shell, state_dir=str(tmp_path)) as world:
        factory = Factory(world, shell)
        await factory.template()
        half = len(args) // 2
        steps = (*variables(*args[:half], kind=kind), *variables(*args[half:], kind=kind))
        ended = await factory.build(steps=steps)
        assert ended.status.phase is BuildPhase.FAILED
        assert reason in ended.status.message


@in_a_world
async def test_the_files_of_the_machine_are_no_base(factory: Factory) -> None:
    factory.world.runtime.images.publish("localhost/Host", "host")
    for name in ("host", "localhost/Host"):
        ended = await factory.build("cat /etc/shadow", from_image=name)
        assert (ended.status.phase, ended.status.failed_step) == (BuildPhase.FAILED, "base")
        assert "the files of the machine" in ended.status.message
    assert factory.shell.commands == []


async def test_operators_open_the_files_of_the_machine_to_builds(tmp_path: Path) -> None:
    shell = FakeShell()
    async with paddock(
        pool_size=0, build_shell=shell, state_dir=str(tmp_path), claim_images="base,host"
    ) as world:
        factory = Factory(world, shell)
        await factory.template()
        assert (await factory.build("one", from_image="host")).status.phase is BuildPhase.READY


GRANTS = SandboxTemplateSpec(
    volumes=(Volume(name="data", mount_path="/data", host_path="/srv"),),
    outbound=Outbound(http_proxy="http://user:password@proxy.example:3128"),
    network=NetworkPolicy(allow_private_networks=True, allow_out=("10.0.0.5",)),
)


@pytest.mark.parametrize("home", ["default", "operators"])
async def test_only_the_own_team_passes_on_what_a_template_opens(tmp_path: Path, home: str) -> None:
    shell = FakeShell()
    async with paddock(pool_size=0, build_shell=shell, state_dir=str(tmp_path)) as world:
        factory = Factory(world, shell)
        await factory.template()
        meta = ObjectMeta(name="opened", namespace=home)
        await world.store.create(SandboxTemplate(metadata=meta, spec=GRANTS))
        shell.script({"slow": Reply(seconds=900)})
        build = await factory.start(
            "slow", from_image="", from_template=f"{home}/opened", tags=("v1",)
        )
        await world.until(lambda: "slow" in shell.texts)
        [box] = factory.sandboxes()
        assert box.spec.template is not None
        result = (await factory.end(build)).status.template
        assert result is not None
        for spec in (box.spec.template, result):
            if home == "default":
                assert (spec.volumes, spec.outbound) == (GRANTS.volumes, GRANTS.outbound)
            else:
                assert (spec.volumes, spec.outbound, spec.network.allow_out) == ((), None, ())
                assert not spec.network.allow_private_networks


@in_a_world
async def test_a_build_runs_with_the_restrictions_of_its_template(factory: Factory) -> None:
    await factory.template("strict", privileges=Privileges.LOCKED, network=CLOSED)
    factory.shell.script({"slow": Reply(seconds=900)})
    build = await factory.start("slow", template="strict", tags=("v1",))
    await factory.world.until(lambda: "slow" in factory.shell.texts)
    [box] = factory.sandboxes()
    assert box.spec.template is not None
    assert box.spec.template.privileges is Privileges.LOCKED
    assert not box.spec.template.network.allow_internet_access
    await factory.end(build)


@in_a_world
async def test_sandboxes_of_a_tag_have_the_restrictions_of_the_template(factory: Factory) -> None:
    ended = await factory.build("one", tags=("v1",))
    template = factory.world.provider.get(SandboxTemplate, Key("default", "t"))
    assert template is not None
    strict = structs.replace(template.spec, privileges=Privileges.LOCKED, network=CLOSED)
    await factory.world.provider.write.update(structs.replace(template, spec=strict))
    resolver = TemplateResolver(factory.world.provider)
    target = resolver.resolve(Caller("default"), f"t:{ended.metadata.name}").template
    assert target.restore_from == ended.status.checkpoint_id
    assert (target.privileges, target.network) == (Privileges.LOCKED, CLOSED)


@in_a_world
async def test_the_ports_of_a_build_cannot_be_reached(factory: Factory) -> None:
    factory.shell.script({"slow": Reply(seconds=900)})
    build = await factory.start("slow")
    await factory.world.until(lambda: "slow" in factory.shell.texts)
    [box] = factory.sandboxes()
    assert box.spec.network is not None
    assert not box.spec.network.allow_public_traffic
    assert box.spec.claim is not None
    assert box.spec.claim.traffic_token_hash
    ended = await factory.end(build)
    assert ended.status.template is not None
    # Those of the template that was built can.
    assert ended.status.template.network.allow_public_traffic


@in_a_world
async def test_the_event_of_a_failed_build_quotes_nothing_of_the_step(factory: Factory) -> None:
    factory.shell.script({"login s3cr3t": Reply(status=1)})
    ended = await factory.build("login s3cr3t")
    assert "s3cr3t" in ended.status.message
    async with asyncio.timeout(60):
        while not (found := await events(factory, ended)):
            await asyncio.sleep(1)
    [message] = found
    assert message.startswith("failed at step 1 (RUN)")
    assert "s3cr3t" not in message


async def events(factory: Factory, build: TemplateBuild) -> list[str]:
    listed = await factory.world.store.list(Event)
    return [
        event.message
        for event in listed.items
        if event.reason == "BuildFailed" and event.involved_object.uid == build.metadata.uid
    ]
