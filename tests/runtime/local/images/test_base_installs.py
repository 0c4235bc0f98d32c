"""What agents do first in a sandbox of the base image: run tools, compile, install packages."""

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


TOOLS = """
    bash corepack curl diff find free gcc g++ git grep gzip ip jq less make nano node npm npx patch
    pip pip3 pkg-config ps python python3 rg sed ssh ssh-keygen ss sudo tar top tput unzip vi wget
    xz zip
"""


async def test_every_tool_is_found_and_runs_as_the_user(box: Instance):
    done = await login(
        box, f"for tool in {' '.join(TOOLS.split())}; do type -P $tool || echo $tool; done", "user"
    )
    missing = [line for line in done.out.splitlines() if not line.startswith("/")]
    assert missing == []
    versions = (
        "gcc --version", "g++ --version", "git --version", "jq --version", "make --version",
        "nano --version", "npx --version", "pip --version", "python --version", "rg --version",
        "vi --version", "ssh -V", "sudo -n true", "ss -H -ltn", "unzip -v", "curl --version",
    )  # fmt: skip
    for command in versions:
        done = await login(box, command, "user")
        assert done.status == 0, (command, done)


async def test_node_is_a_release_with_long_term_support(box: Instance):
    done = await login(box, "node -p '!!process.release.lts'; npm --version", "user")
    assert (done.status, done.error) == (0, "")
    assert done.out.startswith("true\n")


async def test_programs_are_compiled_and_extensions_of_python_built(box: Instance):
    script = """
        set -e; cd /tmp
        echo '#include <iostream>' > hello.cc
        echo 'int main() { std::cout << "hello" << std::endl; }' >> hello.cc
        printf 'hello: hello.cc\n\tg++ -o hello hello.cc\n' > Makefile
        make -s hello; ./hello
        echo '#include <Python.h>' > empty.c
        gcc -c $(pkg-config --cflags python3) empty.c
    """
    done = await login(box, script, "user")
    assert (done.status, done.out, done.error) == (0, "hello\n", "")


async def test_texts_are_utf_8_and_english_is_there(box: Instance):
    script = (
        "locale charmap; LC_ALL=en_US.UTF-8 locale charmap; python3 -c \"print('\\u2713')\"; locale"
    )
    done = await login(box, script, "user")
    assert done.out.splitlines()[:4] == ["UTF-8", "UTF-8", "✓", "LANG=C.UTF-8"]
    assert done.error == ""


@pytest.mark.parametrize("user", ["user", "root"])
async def test_npm_installs_a_package_and_its_program(box: Instance, user: str):
    manifest = (
        '{"name": "shout", "version": "1.0.0", "main": "run.js", "bin": {"shout-now": "run.js"}}'
    )
    script = f"""
        set -e; mkdir -p ~/shout ~/project; cd ~/shout
        echo '{manifest}' > package.json
        echo '#!/usr/bin/env node' > run.js
        echo 'console.log("HELLO"); module.exports = 1' >> run.js
        packed=$(npm pack --silent)
        cd ~/project; npm init -y >/dev/null; npm install --offline --silent ../shout/$packed
        npx shout-now; node -e 'process.exit(require("shout") - 1)'
        npm install --global --offline --silent ../shout/$packed; shout-now
    """
    done = await login(box, script, user)
    assert (done.status, done.error) == (0, ""), done
    assert done.out.endswith("HELLO\nHELLO\nHELLO\n")
    # In the next command too.
    assert (await login(box, "shout-now", user)).out == "HELLO\n"


async def test_dpkg_does_not_sync_every_file(box: Instance):
    done = await login(box, "dpkg --force-help", "root")
    enabled = done.out.partition("Currently enabled options:\n")[2]
    assert "unsafe-io" in enabled.strip().split(",")
