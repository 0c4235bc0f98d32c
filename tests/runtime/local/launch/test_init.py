"""Init alone: the real program as pid 1 of a namespace, used over its channel."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from paddock.envd.process.init_client import InitClient, close_all, take_channel
from paddock.envd.process.init_protocol import (
    NODE_CHANNEL_FD,
    InitError,
    RecordFlags,
    SignalScope,
    SpawnFlags,
    SpawnRequest,
    Stage,
)
from paddock.runtime.local.launch.native_build import compile_init
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

ENV = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("init") / "init"
    compile_init(path)
    return path


class Inside:
    """An init and its clients, which are closed at the end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.ended: asyncio.Queue = asyncio.Queue()
        self._clients: list[InitClient] = []

    async def client(self, *, fd: int = 101) -> InitClient:
        client = InitClient(take_channel(self.pidfd, fd=fd), on_exit=self.ended.put_nowait)
        self._clients.append(client)
        return client

    def states(self) -> list[str]:
        """Return the processes besides init, read from /proc."""
        found = []
        for path in Path(f"/proc/{self.pid}/root/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and path.name != "1":
                    found.append((path / "stat").read_text().rpartition(")")[2].split()[0])
        return found

    def close(self) -> None:
        for client in self._clients:
            client.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)


@pytest.fixture
async def inside(program):
    if os.geteuid() != 0:
        pytest.skip("needs root to make a pid namespace")
    outer = subprocess.Popen(["unshare", "-pfm", "--mount-proc", str(program), "sudo"])
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    pid = int((await eventually(lambda: children.read_text().split()))[0])
    init = Inside(pid)

    def is_serving() -> bool:
        with contextlib.suppress(OSError):
            take_channel(init.pidfd).close()
            return Path(f"/proc/{pid}/comm").read_text() == "init\n"
        return False

    await eventually(is_serving)
    yield init
    init.close()
    outer.wait()


async def test_a_new_client_finds_every_command_with_streams_and_memo(inside):
    first = await inside.client()
    assert await first.attach() == []
    spec = SpawnRequest(id=7, argv=["cat"], env=ENV, flags=SpawnFlags.STDIN_PIPE, memo=b"remember")
    record = await first.spawn(spec)
    close_all(record.fds)
    first.close()
    second = await inside.client()
    (again,) = await second.attach()
    assert (again.id, again.pid, again.memo) == (7, record.pid, b"remember")
    os.write(again.stdin, b"still here\n")
    assert await asyncio.to_thread(os.read, again.stdout, 100) == b"still here\n"
    os.close(again.stdin)
    await second.close_stdin(7)
    assert (await inside.ended.get()).wait_status == 0
    close_all((again.stdout, again.stderr))


async def test_unsent_exits_are_reported_on_attach(inside):
    first = await inside.client()
    await first.attach()
    record = await first.spawn(SpawnRequest(id=1, argv=["sh", "-c", "exit 3"], env=ENV))
    close_all(record.fds)
    await inside.ended.get()
    first.close()
    second = await inside.client()
    (again,) = await second.attach()
    assert again.flags & RecordFlags.EXITED
    assert os.waitstatus_to_exitcode(again.wait_status) == 3
    close_all(again.fds)
    await second.forget(1)
    assert await second.ping() == 0


async def test_a_failed_start_reports_the_stage(inside):
    client = await inside.client()
    await client.attach()
    cases = [
        ({"argv": ["no-such-program"]}, errno.ENOENT, Stage.EXEC),
        ({"argv": ["/etc/passwd"]}, errno.EACCES, Stage.EXEC),
        ({"argv": ["true"], "cwd": "/nowhere"}, errno.ENOENT, Stage.DIRECTORY),
        ({"argv": ["true"], "memo": b"x" * 50_000}, errno.EINVAL, Stage.REQUEST),
    ]
    for number, (changes, code, stage) in enumerate(cases, 1):
        with pytest.raises(InitError) as caught:
            await client.spawn(SpawnRequest(id=number, env=ENV, **changes))
        assert (caught.value.errno, caught.value.stage) == (code, stage)
    assert await client.ping() == 0


async def test_a_used_id_and_forgetting_a_running_command_are_refused(inside):
    client = await inside.client()
    await client.attach()
    record = await client.spawn(SpawnRequest(id=1, argv=["sleep", "60"], env=ENV))
    close_all(record.fds)
    with pytest.raises(InitError) as taken:
        await client.spawn(SpawnRequest(id=1, argv=["true"], env=ENV))
    assert taken.value.errno == errno.EEXIST
    with pytest.raises(InitError) as busy:
        await client.forget(1)
    assert busy.value.errno == errno.EBUSY


async def test_arguments_larger_than_a_datagram_arrive_complete(inside):
    client = await inside.client()
    await client.attach()
    env = ENV | {f"V{n}": "x" * 100_000 for n in range(5)}
    record = await client.spawn(
        SpawnRequest(id=1, argv=["sh", "-c", "env | wc -c"], env=env, flags=SpawnFlags(0))
    )
    await inside.ended.get()
    assert int(os.read(record.stdout, 100)) > 500_000
    close_all(record.fds)


async def test_a_signal_to_the_tree_reaches_processes_outside_the_session(inside):
    client = await inside.client()
    await client.attach()
    script = "setsid sleep 61 & sleep 62 & setsid sh -c 'sleep 63 & wait' & wait"
    record = await client.spawn(SpawnRequest(id=1, argv=["sh", "-c", script], env=ENV))
    children = Path(f"/proc/{inside.pid}/root/proc")

    def sleepers() -> int:
        count = 0
        for path in children.iterdir():
            with contextlib.suppress(OSError):
                count += path.name.isdigit() and b"sleep\0" in (path / "cmdline").read_bytes()
        return count

    await eventually(lambda: sleepers() >= 3)
    assert await client.signal(1, signal.SIGKILL, SignalScope.TREE) >= 4
    await inside.ended.get()
    await eventually(lambda: sleepers() == 0)
    close_all(record.fds)


RUNNERS = """
import os, time
for _ in range(3):
    if not os.fork():
        while True:
            if os.fork():
                os._exit(0)
            time.sleep(0.0005)
"""


async def test_processes_that_fork_all_the_time_cannot_outrun_a_kill(inside):
    client = await inside.client()
    await client.attach()
    for number in range(1, 11):
        spec = SpawnRequest(id=number, argv=["python3", "-c", RUNNERS], env=ENV)
        record = await client.spawn(spec)
        await inside.ended.get()  # it left three that re-fork all the time
        await eventually(inside.states)
        await client.signal(number, signal.SIGKILL, SignalScope.TREE)
        await eventually(lambda: not inside.states())
        close_all(record.fds)


STRAYING = """
import os, time
for _ in range(2):
    if not os.fork():
        while True:
            child = os.fork()
            if not child:
                if not os.fork():
                    time.sleep(0.001)
                    os.setsid()
                    time.sleep(0.1)
                    os._exit(0)
                time.sleep(0.002)
                os._exit(0)
            os.waitpid(child, 0)
time.sleep(60)
"""


async def test_processes_that_leave_the_tree_during_a_kill_are_not_left_stopped(inside):
    client = await inside.client()
    await client.attach()
    for number in range(1, 11):
        spec = SpawnRequest(id=number, argv=["python3", "-c", STRAYING], env=ENV)
        record = await client.spawn(spec)
        await eventually(lambda: len(inside.states()) > 8)
        await client.signal(number, signal.SIGKILL, SignalScope.TREE)
        await inside.ended.get()
        # A process that left the tree before exits by itself; a stopped one would not.
        await eventually(lambda: not inside.states())
        close_all(record.fds)


@pytest.mark.parametrize("room", [0, 1], ids=["for nothing", "for the list of processes"])
async def test_a_kill_without_descriptors_reaches_the_known_processes(inside, room):
    client = await inside.client()
    await client.attach()
    record = await client.spawn(SpawnRequest(id=1, argv=["sh", "-c", "sleep 60; true"], env=ENV))
    close_all(record.fds)
    taken = {int(path.name) for path in Path(f"/proc/{inside.pid}/fd").iterdir()}
    free = next(number for number in range(100) if number not in taken)
    resource.prlimit(inside.pid, resource.RLIMIT_NOFILE, (free + room, 4096))
    assert await client.signal(1, signal.SIGKILL, SignalScope.TREE) == 1
    await inside.ended.get()
    await eventually(lambda: not inside.states())


async def test_terminals_have_a_size_and_the_user_owns_them(inside):
    client = await inside.client()
    await client.attach()
    spec = SpawnRequest(
        id=1, argv=["sh", "-c", "stty size; stat -c %u $(tty)"], env=ENV, uid=1000, gid=1000,
        flags=SpawnFlags.PTY, rows=33, cols=101,
    )  # fmt: skip
    record = await client.spawn(spec)
    await inside.ended.get()
    # The output arrives in pieces, and then an error.
    said = b""
    with contextlib.suppress(OSError):
        while len(said.split()) < 3 or not said.endswith(b"\n"):
            said += os.read(record.pty, 1000)
    assert said.split() == [b"33", b"101", b"1000"]
    os.close(record.pty)


async def test_a_client_that_does_not_read_blocks_only_its_own_channel(inside):
    # Given a client that sends requests and never reads, until its channel is full
    rude = take_channel(inside.pidfd)
    rude.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            rude.send(b"\x01\0\0\0" + b"\1\0\0\0" + b"\0\0\0\0")
    # When the other channel is used
    other = await inside.client(fd=NODE_CHANNEL_FD)
    await other.attach()
    record = await other.spawn(SpawnRequest(id=1, argv=["echo", "fine"], env=ENV))
    await inside.ended.get()
    # Then it works, and the first channel works again once it is drained
    assert os.read(record.stdout, 10) == b"fine\n"
    close_all(record.fds)
    rude.close()
    patient = await inside.client()
    assert await asyncio.wait_for(patient.attach(), 30) == []


async def test_orphans_are_reaped(inside):
    client = await inside.client()
    await client.attach()
    script = "for i in 1 2 3 4 5; do (sh -c 'sleep 0.05 & exit' &) ; done; true"
    record = await client.spawn(SpawnRequest(id=1, argv=["sh", "-c", script], env=ENV))
    await inside.ended.get()
    close_all(record.fds)

    def no_child_is_left() -> bool:
        return not Path(f"/proc/{inside.pid}/task/{inside.pid}/children").read_text().split()

    await eventually(no_child_is_left)
