"""Start and ready commands: whose context they run in, and what a missing program causes."""

import pytest

from paddock.controllers.template_build.ports import BuildCommand
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import BuildPhase, BuildStep
from paddock.resources.meta import Key
from tests.controllers.template_build.shell import Reply
from tests.controllers.template_build.test_builds import Factory, in_a_world

pytestmark = pytest.mark.looptime
PARENT = (
    BuildStep(type="ENV", args=("WHO", "parent")),
    BuildStep(type="USER", args=("ana",)),
    BuildStep(type="WORKDIR", args=("/srv",)),
)
CHILD = (
    BuildStep(type="ENV", args=("WHO", "child", "MORE", "1")),
    BuildStep(type="WORKDIR", args=("/other",)),
)


async def build_child(factory: Factory, name: str, parent: str, **spec: object) -> None:
    await factory.template(name)
    ended = await factory.build(
        template=name, from_image="", from_template=parent, steps=CHILD, **spec
    )
    assert ended.status.phase is BuildPhase.READY, ended.status


def last(factory: Factory, text: str) -> BuildCommand:
    return [command for command in factory.shell.commands if command.text == text][-1]


def context(command: BuildCommand) -> tuple[str, str | None, dict[str, str]]:
    return command.user, command.workdir, dict(command.env)


async def a_parent(factory: Factory) -> None:
    """Build `t` with a server that user ana runs in /srv."""
    await factory.build(steps=PARENT, start_command="serve", ready_command="ready")


@in_a_world
async def test_an_inherited_start_command_runs_in_the_context_of_its_template(
    factory: Factory,
) -> None:
    await a_parent(factory)
    await build_child(factory, "child", "t")
    # Also in a child of the child, which inherits it from there.
    await build_child(factory, "grandchild", "child")
    assert factory.shell.texts.count("serve") == 3
    for text in ("serve", "ready"):
        assert context(last(factory, text)) == ("ana", "/srv", {"WHO": "parent"})
    template = factory.world.provider.get(SandboxTemplate, Key("default", "grandchild"))
    assert template is not None
    assert (template.spec.user, template.spec.workdir) == ("user", "/other")
    assert template.spec.env == {"WHO": "child", "MORE": "1"}


@in_a_world
async def test_an_own_start_command_runs_in_the_context_of_the_last_step(factory: Factory) -> None:
    await a_parent(factory)
    await build_child(factory, "child", "t", start_command="mine", ready_command="ready")
    expected = ("user", "/other", {"WHO": "child", "MORE": "1"})
    assert context(last(factory, "mine")) == expected
    assert context(last(factory, "ready")) == expected


SAID = (
    b"/bin/bash: line 1: ss: command not found\n",
    b"sh: 1: ss: not found\n",
    b"/bin/sh: ss: not found\n",
)


@in_a_world
async def test_a_program_that_the_image_lacks_is_warned_of_once(factory: Factory) -> None:
    for said in SAID:
        factory.shell.script({"serve": Reply(seconds=9000)})
        factory.shell.replies["ready"] = [Reply(status=1, stderr=said)] * 3
        ended = await factory.build(start_command="serve", ready_command="ready", force=True)
        assert ended.status.phase is BuildPhase.READY
        warnings = [text for text in await factory.messages(ended) if "does not have" in text]
        assert len(warnings) == 1, said
        assert warnings[0].startswith("The ready command needs 'ss', which the image does not have")


@in_a_world
async def test_what_a_ready_command_says_while_a_server_starts_is_no_warning(
    factory: Factory,
) -> None:
    factory.shell.script({"serve": Reply(seconds=9000)})
    refused = Reply(status=1, stderr=b"curl: (7) Failed to connect\npage: not found here\n")
    factory.shell.replies["ready"] = [refused] * 3
    ended = await factory.build(start_command="serve", ready_command="ready")
    assert not [text for text in await factory.messages(ended) if "does not have" in text]


@in_a_world
async def test_a_ready_command_that_never_succeeds_is_quoted(factory: Factory) -> None:
    factory.shell.script({"serve": Reply(seconds=9000)})
    factory.shell.replies["ready"] = [Reply(status=1, stderr=b"curl: (7) refused\n")] * 1000
    ended = await factory.build(start_command="serve", ready_command="ready")
    assert ended.status.message.endswith("within 600 s; it said: curl: (7) refused")
