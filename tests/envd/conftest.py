"""Fixtures: a real envd on real sockets, with commands forked in a scratch directory.

`rig` runs every test twice: commands forked by envd itself, and by a real init.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import paddock
from paddock.envd import blocking
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.init_client import take_channel
from paddock.envd.process.init_spawner import InitSpawner
from tests.envd.rig import Rig, close_rig, open_rig


@pytest.fixture(scope="session", autouse=True)
def stop_envd_threads() -> Iterator[None]:
    """Stop envd's threads, which serve all tests of this process."""
    yield
    blocking.stop_threads()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory that other users may enter; pytest's own is closed to them."""
    directory = Path(tempfile.mkdtemp(prefix="paddock-envd-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def init_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled pid 1 of a sandbox."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("init is written in C and there is no compiler here")
    source = Path(paddock.__file__).parent / "runtime/local/launch/native/init/init.c"
    program = tmp_path_factory.mktemp("init") / "init"
    subprocess.run([compiler, "-static", "-Os", "-o", program, source], check=True)
    return program


class Init:
    """A running init outside of any sandbox: same program, same channel, the host's pids."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen([program, "sudo"])
        self.pidfd = os.pidfd_open(self.process.pid)

    def channel(self) -> socket.socket:
        deadline = time.monotonic() + 20
        while True:
            try:
                return take_channel(self.pidfd)
            except OSError:
                assert time.monotonic() < deadline, "init did not start"
                time.sleep(0.005)

    def end(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it may have ended
                os.kill(int(pid), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)


@pytest.fixture
def init(init_program: Path) -> Iterator[Init]:
    if os.geteuid() != 0:
        pytest.skip("init gives up privileges it must have first: needs root")
    running = Init(init_program)
    yield running
    running.end()


@pytest.fixture(params=["direct", "init"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    if request.param == "init":
        spawner = InitSpawner(request.getfixturevalue("init").channel())
    else:
        spawner = DirectSpawner()
    opened = await open_rig(tmp_path, spawner=spawner)
    yield opened
    await close_rig(opened)
