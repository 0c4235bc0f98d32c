"""The node's side of the zygote: resource shortages and cancelled callers."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
from pathlib import Path

import pytest

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.envd.zygote import ZygoteBrokenError, ZygoteProcess
from tests.runtime.local.nodes import eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def zygote():
    made = ZygoteProcess()
    yield made
    made.stop()


@pytest.fixture
def listener(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "envd.sock"))
        made.listen()
        yield made


async def fork(zygote: ZygoteProcess, listener: socket.socket) -> None:
    _, pidfd = await zygote.fork({}, {"listener": listener.fileno()})
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


async def test_a_zygote_without_descriptors_is_not_broken(zygote, listener):
    await fork(zygote, listener)
    pid = zygote.pid
    await eventually(lambda: not children_of(pid))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken + 1, limits[1]))
    with pytest.raises(UnavailableError) as refused:
        await fork(zygote, listener)
    assert not isinstance(refused.value, ZygoteBrokenError)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    await fork(zygote, listener)
    assert zygote.pid == pid


async def test_a_zygote_that_exits_after_a_reply_is_not_broken(zygote, listener):
    await fork(zygote, listener)
    os.kill(zygote.pid, signal.SIGSTOP)
    asked = asyncio.create_task(zygote.fork({}, {"listener": listener.fileno()}))
    await asyncio.sleep(0)
    zygote._exit_reason = "OSError: too many open files"  # as the zygote would report it
    os.kill(zygote.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="too many open files") as lost:
        await asked
    assert not isinstance(lost.value, ZygoteBrokenError)


async def test_an_envd_whose_caller_is_cancelled_is_killed(zygote, listener):
    await fork(zygote, listener)
    pid = zygote.pid
    await eventually(lambda: not children_of(pid))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    asked = asyncio.create_task(zygote.fork({}, {"listener": listener.fileno()}))
    await asyncio.sleep(0)
    (future,) = zygote._pending.values()
    while not future.done():  # the reply arrives before the caller is woken
        await asyncio.sleep(0)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    assert asked.cancelled()
    await eventually(lambda: not children_of(pid))
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
