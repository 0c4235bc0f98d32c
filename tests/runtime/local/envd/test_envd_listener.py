"""The door to one sandbox's envd, whatever becomes of disks, descriptors and the zygote."""

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from paddock.runtime.local.envd import envd_listener
from paddock.runtime.local.envd.envd_listener import EnvdListener
from paddock.runtime.local.envd.zygote import ZygoteBrokenError
from tests.runtime.local.nodes import eventually

pytestmark = pytest.mark.timeout(60)


class FakeZygote:
    """Its envds are processes that take no caller; or it is broken."""

    def __init__(self) -> None:
        self.is_broken = False
        self.asked = 0
        self.children: list[subprocess.Popen[bytes]] = []

    async def fork(self, _config, _fds) -> tuple[int, int]:
        self.asked += 1
        if self.is_broken:
            raise ZygoteBrokenError("it does not start")
        child = subprocess.Popen(["sleep", "60"])
        self.children.append(child)
        return child.pid, os.pidfd_open(child.pid)

    def kill(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGKILL)
            child.wait()


class House:
    """A door, and a disk that can be full."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "envd.sock"
        self.zygote = FakeZygote()
        self.is_full = False
        self.tasks: list[asyncio.Task[None]] = []
        self.callers: list[asyncio.StreamWriter] = []
        """Kept, as they stay on the line."""
        self.listener = EnvdListener(
            self.zygote, self.path,
            open_parts=lambda _parts: ({}, {}), on_change=self._write,
            spawn=lambda _name, work: self.tasks.append(asyncio.create_task(work)),
        )  # fmt: skip

    def _write(self, _process) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def call(self) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        self.callers.append(writer)
        return reader


class Deaf:
    """A listening socket in a process without descriptors."""

    def __init__(self, listener) -> None:
        self._listener = listener

    def accept(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def __getattr__(self, name: str):
        return getattr(self._listener, name)


@pytest.fixture
async def house(tmp_path):
    made = House(tmp_path)
    yield made
    made.listener.close(kill=True)
    made.zygote.kill()
    for caller in made.callers:
        caller.close()
    await asyncio.wait(made.tasks)


async def test_callers_are_served_on_a_full_disk(house):
    house.is_full = True
    house.listener.open()
    await house.call()
    await eventually(lambda: house.listener.is_serving)
    # It ends, and the one who called it before still waits: so there is another.
    house.zygote.kill()
    await eventually(lambda: house.zygote.asked == 2 and house.listener.is_serving)


async def test_callers_are_rejected_concurrently_when_envd_cannot_start(house, monkeypatch):
    monkeypatch.setattr(envd_listener, "_REJECT_SECONDS", 5.0)
    house.zygote.is_broken = True
    house.listener.listen()
    readers = [await house.call() for _ in range(5)]
    house.listener.open()
    # None of them hangs up, and yet all have read it before the first is given up.
    async with asyncio.timeout(4):
        for reader in readers:
            assert b"it does not start" in await reader.read()


async def test_starts_back_off_when_callers_cannot_be_rejected(house):
    house.zygote.is_broken = True
    house.listener.listen()
    house.listener._listener = Deaf(house.listener._listener)
    await house.call()
    house.listener.open()
    await asyncio.sleep(0.5)
    assert house.zygote.asked <= 4
