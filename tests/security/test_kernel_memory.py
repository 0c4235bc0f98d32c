"""Kernel memory that no limit counts: what is refused or limited. The rest is in the battery."""

import asyncio
import base64
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.runtime.local.kernel import uncharged
from paddock.runtime.port import Instance, Limits
from tests.runtime.local.inside import begin, run
from tests.runtime.local.isolation.test_escape_floods import group_of
from tests.runtime.local.nodes import eventually
from tests.security.battery.kernel_memory import PRELUDE

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

MEMORY = 256 << 20
ALLOWED = uncharged.allowance(MEMORY)


async def attack(instance: Instance, program: str) -> None:
    code = base64.b64encode((PRELUDE + program).encode()).decode()
    await begin(instance, f"echo {code} | base64 -d | exec python3 - > /tmp/output 2>&1")


REFUSED = {
    "asynchronous I/O": (
        "context = ctypes.c_ulong(); libc.syscall(206, 16, ctypes.byref(context))",
        "ENOSYS",
    ),
    "POSIX message queues": ("libc.mq_open(b'/q', 0x42, 0o600, None)", "ENOSYS"),
    "packet filters": (
        """
allow = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF))
head = struct.pack("HxxxxxxP", 1, ctypes.addressof(allow))
one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
libc.setsockopt(one.fileno(), socket.SOL_SOCKET, 26, head, len(head))
""",
        "ENOPROTOOPT",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_counted_is_refused(box, name):
    instance = await box()
    call, expected = REFUSED[name]
    program = f"{PRELUDE}\n{call}\nprint(errno.errorcode[ctypes.get_errno()])"
    code = base64.b64encode(program.encode()).decode()
    assert (await run(instance, f"echo {code} | base64 -d | python3 -")).out == f"{expected}\n"


UNREAD = {
    "TCP": """
def work(number):
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    for _ in range(60):
        sender = socket.create_connection(listener.getsockname())
        sender.setblocking(False)
        kept.extend((sender, listener.accept()[0]))
        try:
            while True:
                sender.send(bytes(65536))
        except BlockingIOError:
            pass
""",
    "UDP": """
def work(number):
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(400):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        kept.append(receiver)
        for _ in range(30):
            sender.sendto(bytes(8000), receiver.getsockname())
""",
}


@pytest.mark.parametrize("protocol", UNREAD)
async def test_unread_data_of_sockets_is_limited(node, box, protocol):
    """On cgroup v1 it has a limit of its own; on v2 it is part of the memory limit."""
    instance = await box(limits=Limits(memory_bytes=MEMORY))
    groups, group = await group_of(node, instance.uid)
    if "memory" in groups.layout.v2:
        pytest.skip("it counts as memory on cgroup v2")
    program = f"{UNREAD[protocol]}\nwork(0)\nopen('/tmp/done', 'w')\ntime.sleep(300)"

    await attack(instance, program)
    await eventually(lambda: _exists(instance, "/tmp/done"), seconds=60)

    directory = groups.directories(group)["cgroup_memory"]
    charged = int(Path(directory, "memory.kmem.tcp.usage_in_bytes").read_text())
    assert 8 << 20 < charged < ALLOWED
    assert (await run(instance, "echo fine")).out == "fine\n"


async def _exists(instance: Instance, path: str) -> bool:
    return (await run(instance, f"test -e {path}")).status == 0


MANY_FILTERS = "in_processes(400, lambda number: install_filters())"


async def test_sandboxes_that_fill_the_pool_of_seccomp_filters_do_not_keep_others_from_starting(
    node, box
):
    """Filters of all sandboxes come from one pool, so that more memory allows no more of them."""
    attackers = [await box(limits=Limits(memory_bytes=2 << 30)) for _ in range(4)]
    for one in attackers:
        await attack(one, MANY_FILTERS)

    async def reasons() -> list[str]:
        assert (await run(await box(privileges="locked"), "echo fine")).out == "fine\n"
        found = [await node.runtime.inspect(one.uid) for one in attackers]
        return [one.reason for one in found if one is not None and one.state == "failed"]

    async def all_have_failed() -> bool:
        return len(await reasons()) == len(attackers)

    await eventually(all_have_failed, seconds=60, pause=1)
    assert all("seccomp filters" in reason for reason in await reasons())


HIDDEN_SIGNALS = """
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
info = ctypes.create_string_buffer(struct.pack("iii", 40, 0, -1) + bytes(128))
for uid in range(2000, 2040):
    os.setresuid(uid, 0, 0)
    for _ in range(9000):
        if libc.syscall(129, os.getpid(), 40, info) < 0:
            break
os.setresuid(5000, 0, 0)
open("/tmp/done", "w")
time.sleep(300)
"""
QUEUE = """
import ctypes, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {41})
info = ctypes.create_string_buffer(struct.pack("iii", 41, 0, -1) + bytes(128))
print(sum(libc.syscall(129, os.getpid(), 41, info) == 0 for _ in range(1000)))
"""


async def test_pending_signals_of_sandboxes_leave_half_of_them_to_the_machine(box):
    """Those of user ids that no process has any more are not visible in /proc."""
    instance = await box()
    await attack(instance, HIDDEN_SIGNALS)
    await eventually(lambda: _exists(instance, "/tmp/done"), seconds=60)

    queued = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", QUEUE], capture_output=True, check=True
    )
    assert queued.stdout == b"1000\n"
