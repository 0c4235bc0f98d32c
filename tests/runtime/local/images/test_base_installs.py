"""Packages are installed in sandboxes of the base image, as agents do it first of all."""

import base64
import io
import zipfile

import pytest

from paddock.runtime.local.images.base import is_built
from paddock.runtime.port import Blueprint, Instance
from tests.runtime.local.inside import Outcome, start

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not is_built(), reason="the base image is not built on this machine"),
]

WHEEL = "greeter-1.0-py3-none-any.whl"


def wheel() -> bytes:
    """Return a package with a module and a console script."""
    facts = "greeter-1.0.dist-info"
    files = {
        "greeter.py": "def main():\n    print('hello')\n",
        f"{facts}/METADATA": "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n",
        f"{facts}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{facts}/entry_points.txt": "[console_scripts]\ngreet-now = greeter:main\n",
    }
    files[f"{facts}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{facts}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


async def login(instance: Instance, script: str, user: str) -> Outcome:
    """Run a script as SDKs do."""
    return await start(instance, ["/bin/bash", "-l", "-c", script], user=user)


@pytest.fixture
async def box(node):
    instance = await node.runtime.create(Blueprint(uid="i-installs", image="base"))
    yield instance
    await node.runtime.destroy(instance.uid)


@pytest.mark.parametrize("user", ["user", "root"])
async def test_pip_installs_a_module_and_its_script(box: Instance, user: str):
    encoded = base64.b64encode(wheel()).decode()
    script = (
        f"echo {encoded} | base64 -d > /tmp/{WHEEL} && "
        f"pip install --no-index /tmp/{WHEEL} && greet-now && python -c 'import greeter'"
    )
    done = await login(box, script, user)
    assert done.status == 0, done.error
    assert done.out.endswith("hello\n")
    assert done.error == ""
    # In the next command too.
    assert (await login(box, "greet-now", user)).out == "hello\n"


async def test_dpkg_does_not_sync_every_file(box: Instance):
    done = await login(box, "dpkg --force-help", "root")
    enabled = done.out.partition("Currently enabled options:\n")[2]
    assert "unsafe-io" in enabled.strip().split(",")
