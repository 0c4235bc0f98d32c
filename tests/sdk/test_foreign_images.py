"""Unmodified clients in sandboxes of images that lack `user`, bash and /etc/passwd."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.runtime.local.images import ImageStore
from tests.installation import Installation
from tests.runtime.local.images.small_roots import shell_root, static_root
from tests.sdk.clients import LEAVE, NEWEST, OLDER, python_of

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(480)]

TEMPLATES = """
apiVersion: paddock.dev/v1alpha1
kind: SandboxTemplate
metadata: {name: bare}
spec: {image: bare}
---
apiVersion: paddock.dev/v1alpha1
kind: SandboxTemplate
metadata: {name: static}
spec: {image: static}
---
apiVersion: paddock.dev/v1alpha1
kind: SandboxTemplate
metadata: {name: stranger}
spec: {image: bare, user: stranger}
"""

COMMANDS = """
import json
from e2b import Sandbox
with Sandbox.create("bare") as box:
    found = {}
    for name, options in (("default", {}), ("root", {"user": "root"})):
        found[name] = box.commands.run("id -un; pwd", **options).stdout
        box.files.write("note", name, **options)
        found[name] += box.files.read("note", **options)
    print(json.dumps(found))
"""

REASONS = """
import json
from e2b import Sandbox
box = Sandbox.create("static")
box.files.write("/srv/note", "kept")
found = {"file": box.files.read("/srv/note")}
try:
    box.commands.run("true")
except Exception as error:
    found["command"] = str(error)
box.kill()
try:
    Sandbox.create("stranger")
except Exception as error:
    found["template"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def paddock(installation: Installation, tmp_path_factory: pytest.TempPathFactory):
    """Import the images and apply the templates; return a function that runs the CLI."""
    directory = tmp_path_factory.mktemp("roots")
    store = ImageStore(installation.node_state / "images")
    store.add(shell_root(directory / "bare"), "bare")
    store.add(static_root(directory / "static"), "static")

    def run(*arguments: str, text: str = "") -> str:
        command = [str(Path(sys.executable).with_name("paddock")), *arguments]
        environment = installation.environment
        done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("apply", "-f", "-", text=TEMPLATES)
    return run


def client(script: str, version: str, environment: dict[str, str]) -> dict[str, str]:
    command = [str(python_of(version)), "-c", script + LEAVE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("version", [NEWEST, OLDER])
def test_commands_and_files_work_as_the_default_user_and_root(paddock, environment, version: str):
    found = client(COMMANDS, version, environment)
    assert found["default"] == "user\n/home/user\ndefault"
    assert found["root"] == "root\n/root\nroot"


def test_the_command_line_tool_runs_commands(paddock):
    created = json.loads(paddock("-o", "json", "sandbox", "create", "bare"))
    ident = created["sandboxID"]
    assert paddock("sandbox", "exec", ident, "id", "-un") == "user\n"
    assert paddock("sandbox", "exec", "-u", "root", ident, "id -un; pwd") == "root\n/root\n"
    paddock("sandbox", "kill", ident)


def test_what_cannot_work_has_a_reason(paddock, environment):
    found = client(REASONS, NEWEST, environment)
    assert found["file"] == "kept"
    assert "the sandbox's image has no shell" in found["command"]
    assert "user 'stranger' of the template does not exist in image 'bare'" in found["template"]
