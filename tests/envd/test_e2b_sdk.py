"""The unmodified `e2b` package from PyPI against an envd."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.envd.config import Config, EnvdSettings
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.init_spawner import InitSpawner
from paddock.envd.server import Envd
from tests.envd.rig import write_users
from tests.sdk.clients import LEAVING

SDK = Path(os.environ.get("PADDOCK_SDK_DIR", "/var/cache/paddock/sdk")) / "e2b-2.63.0"


@pytest.fixture(scope="module")
def sdk_python() -> Path:
    """The interpreter of the SDK; installed if missing."""
    python = SDK / "bin/python"
    if not python.exists():
        SDK.parent.mkdir(parents=True, exist_ok=True)
        for command in (
            [sys.executable, "-m", "venv", str(SDK)],
            [str(python), "-m", "pip", "install", "-q", "e2b==2.63.0"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"the SDK cannot be installed here: {done.stderr.strip()[-200:]}")
    return python


@pytest.fixture(params=["direct", "init"])
async def address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    if request.param == "init":
        spawner = InitSpawner(request.getfixturevalue("init").channel())
    else:
        spawner = DirectSpawner()
    config = Config(
        sandbox_id="isbx",
        settings=EnvdSettings(access_token="tok"),
        identity_dir=None,
        **write_users(tmp_path),
    )
    envd = Envd(config, spawner)
    await envd.start(listener)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    envd.close()
    await asyncio.sleep(0)


@pytest.mark.sdk
@pytest.mark.timeout(240)
@pytest.mark.parametrize("session", ["sdk_session.py", "sdk_binary_session.py"])
async def test_an_sdk_session_succeeds(sdk_python: Path, address: str, session: str) -> None:
    script = Path(__file__).parent / "sdk_scripts" / session
    process = await asyncio.create_subprocess_exec(
        sdk_python,
        LEAVING,
        script,
        address,
        "tok",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await process.communicate()

    assert process.returncode == 0, said.decode()
    assert said.decode().strip().endswith("done"), said.decode()
