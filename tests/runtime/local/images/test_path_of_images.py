"""PATH of images and templates in the command lines of real sandboxes."""

from pathlib import Path

import pytest

from paddock.envd.config import DEFAULT_PATH
from paddock.runtime.local.images import ImageStore
from paddock.runtime.local.images.model import ImageConfig
from paddock.runtime.port import AgentConfig
from tests.runtime.local.images.small_roots import shell_root
from tests.runtime.local.images.test_foreign_images import command_line, make
from tests.runtime.local.inside import start

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]
__all__ = ["make"]

TOOL = "/opt/tool/bin"
WHOLE = f"{TOOL}:{DEFAULT_PATH}"
RESET = "PATH=/usr/local/bin:/usr/bin:/bin\nexport PATH\n"
PROFILE = f"{RESET}for i in /etc/profile.d/*.sh; do if [ -r $i ]; then . $i; fi; done\n"
PROFILES = {"parts": PROFILE, "own": RESET, "none": None}


def tool_root(root: Path, profile: str | None) -> Path:
    """The root of an image with a program that only its own PATH finds."""
    shell_root(root)
    (root / "opt/tool/bin").mkdir(parents=True)
    program = root / "opt/tool/bin/tool"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    (root / "etc").mkdir()
    if profile is not None:
        (root / "etc/profile").write_text(profile)
    return root


@pytest.fixture(scope="module")
def images(_node, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("roots")
    store = ImageStore(_node.state / "images")
    config = ImageConfig(env={"PATH": WHOLE})
    for name, profile in PROFILES.items():
        root = tool_root(directory / name, profile)
        store.add_directory(root, f"tool-{name}", config=config)


@pytest.fixture
async def stored(node):
    """Delete the checkpoints of a test."""
    yield
    for checkpoint in await node.runtime.checkpoints():
        await node.runtime.delete_checkpoint(checkpoint.id)


@pytest.mark.parametrize("kind", PROFILES)
@pytest.mark.parametrize("user", ["user", "root"])
async def test_the_path_of_an_image_is_that_of_command_lines(make, kind: str, user: str):
    instance = await make(f"tool-{kind}")
    assert await command_line(instance, 'tool; echo "$PATH"', user) == f"found\n{WHOLE}\n"
    shell = await start(instance, ["/bin/sh", "-l", "-c", "tool"], user=user)
    assert (shell.status, shell.out) == (0, "found\n")


async def test_template_and_sandbox_replace_the_path_of_the_image(make):
    template = await make("tool-parts", env={"PATH": "/opt/mine"})
    assert await command_line(template, 'echo "$PATH"', "user") == f"/opt/mine:{DEFAULT_PATH}\n"
    agent = AgentConfig(env={"PATH": "/opt/own"})
    sandbox = await make("tool-parts", env={"PATH": "/opt/mine"}, agent=agent)
    assert await command_line(sandbox, 'echo "$PATH"', "user") == f"/opt/own:{DEFAULT_PATH}\n"


async def test_a_path_that_nobody_has_set_is_that_of_the_profile(make):
    instance = await make("tool-parts", env={"PATH": DEFAULT_PATH})
    assert await command_line(instance, 'echo "$PATH"', "user") == "/usr/local/bin:/usr/bin:/bin\n"


async def test_the_path_holds_in_restored_sandboxes_and_after_pauses(make, node, stored):
    instance = await make("tool-parts")
    assert await command_line(instance, "tool", "user") == "found\n"
    await node.runtime.snapshot(instance.uid, "files", memory=False, keep_running=True)
    restored = await make("tool-parts", checkpoint_id="files")
    assert await command_line(restored, 'tool; echo "$PATH"', "user") == f"found\n{WHOLE}\n"
    await node.runtime.hibernate(instance.uid)
    assert await command_line(await node.runtime.restore(instance.uid), "tool", "user") == "found\n"


@pytest.mark.parametrize("user", ["user", "root"])
async def test_the_path_holds_with_the_profile_of_this_machine(make, user: str):
    instance = await make("host", env={"PATH": "/opt/mine"})
    assert f"/opt/mine:{DEFAULT_PATH}" in await command_line(instance, 'echo "$PATH"', user)
