"""The envd listener on a full disk, without descriptors, and with a broken zygote."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from paddock.runtime.local.envd import envd_listener
from paddock.runtime.local.envd.envd_listener import EnvdListener
from paddock.runtime.local.envd.zygote import ZygoteBrokenError
from tests.runtime.local.nodes import eventually

pytestmark = pytest.mark.timeout(60)


class FakeZygote:
    """Forks processes that accept no connection, or is broken."""

    def __init__(self) -> None:
        self.is_broken = False
        self.forks = 0
        self.children: list[subprocess.Popen[bytes]] = []

    async def fork(self, _config, _fds) -> tuple[int, int]:
        self.forks += 1
        if self.is_broken:
            raise ZygoteBrokenError("it does not start")
        child = subprocess.Popen(["sleep", "60"])
        self.children.append(child)
        return child.pid, os.pidfd_open(child.pid)

    def kill(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGKILL)
            child.wait()


class ListenerWorld:
    """A listener, and a disk that can be full."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "envd.sock"
        self.zygote = FakeZygote()
        self.is_full = False
        self.tasks: list[asyncio.Task[None]] = []
        self.inside: socket.socket | None = None
        """The socket for code inside the sandbox."""
        self.callers: list[asyncio.StreamWriter] = []
        """Kept, so that the connections stay open."""
        self.listener = EnvdListener(
            self.zygote, self.path,
            open_parts=lambda _parts: ({}, {}), on_change=self._write,
            spawn=lambda _name, work: self.tasks.append(asyncio.create_task(work)),
            open_inside=lambda: self.inside,
        )  # fmt: skip

    def _write(self, _process) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def call(self) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        self.callers.append(writer)
        return reader


class WithoutDescriptors:
    """A listening socket whose accept fails with EMFILE."""

    def __init__(self, listener) -> None:
        self._listener = listener

    def accept(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def __getattr__(self, name: str):
        return getattr(self._listener, name)


@pytest.fixture
async def world(tmp_path):
    made = ListenerWorld(tmp_path)
    yield made
    made.listener.close(kill=True)
    made.zygote.kill()
    for caller in made.callers:
        caller.close()
    await asyncio.wait(made.tasks)


async def test_callers_are_served_on_a_full_disk(world):
    world.is_full = True
    world.listener.open()
    await world.call()
    await eventually(lambda: world.listener.is_serving)
    # It is killed while a caller still waits: another one is started.
    world.zygote.kill()
    await eventually(lambda: world.zygote.forks == 2 and world.listener.is_serving)


async def test_callers_are_rejected_concurrently_when_envd_cannot_start(world, monkeypatch):
    monkeypatch.setattr(envd_listener, "_REJECT_SECONDS", 5.0)
    world.zygote.is_broken = True
    world.listener.listen()
    readers = [await world.call() for _ in range(5)]
    world.listener.open()
    # No caller closes its connection, and still all are served before the first timeout.
    async with asyncio.timeout(4):
        for reader in readers:
            assert b"it does not start" in await reader.read()


async def test_starts_back_off_when_callers_cannot_be_rejected(world):
    world.zygote.is_broken = True
    world.listener.listen()
    world.listener._listener = WithoutDescriptors(world.listener._listener)
    await world.call()
    world.listener.open()
    await asyncio.sleep(0.5)
    assert world.zygote.forks <= 4


async def test_code_inside_the_sandbox_starts_envd_again_and_again_only_with_pauses(
    world, monkeypatch
):
    world.inside = socket.create_server(("127.0.0.1", 0))
    world.inside.setblocking(False)
    world.listener.open()
    with socket.create_connection(world.inside.getsockname()):
        await eventually(lambda: world.listener.is_serving)
        assert world.zygote.forks == 1
        # It ends, and the connection still waits: nothing is started for it alone.
        world.zygote.kill()
        await eventually(lambda: not world.listener.is_serving)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not world.listener.is_serving
        assert world.zygote.forks == 1
        # Calls of others are served at once.
        await world.call()
        await eventually(lambda: world.listener.is_serving)
        assert world.zygote.forks == 2
        # After the pause, a connection from inside starts another one.
        world.zygote.children[1].kill()
        monkeypatch.setattr(envd_listener, "_INSIDE_SECONDS", 0.0)
        await eventually(lambda: world.zygote.forks == 3)


async def test_a_connection_from_inside_that_waited_long_enough_starts_envd(world, monkeypatch):
    monkeypatch.setattr(envd_listener, "_INSIDE_SECONDS", 0.2)
    world.inside = socket.create_server(("127.0.0.1", 0))
    world.inside.setblocking(False)
    world.listener.open()
    with socket.create_connection(world.inside.getsockname()):
        await eventually(lambda: world.listener.is_serving)
        world.zygote.kill()
        await eventually(lambda: world.zygote.forks == 2 and world.listener.is_serving)
