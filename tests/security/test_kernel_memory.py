"""Kernel memory that no limit counts: refused, limited, or the end of the sandbox."""

import base64
from pathlib import Path

import pytest

from paddock.runtime.local.kernel import uncharged
from paddock.runtime.port import Instance, Limits
from tests.runtime.local.inside import begin, run
from tests.runtime.local.isolation.test_escape_floods import group_of
from tests.runtime.local.nodes import TestNode, eventually
from tests.security.battery import kernel_memory
from tests.security.battery.kernel_memory import PRELUDE, WATCHED

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

MEMORY = 256 << 20
ALLOWED = uncharged.allowance(MEMORY)


async def attack(instance: Instance, program: str) -> None:
    code = base64.b64encode((PRELUDE + program).encode()).decode()
    await begin(instance, f"echo {code} | base64 -d | exec python3 - > /tmp/output 2>&1")


async def has_failed(node: TestNode, uid: str) -> str | None:
    found = await node.runtime.inspect(uid)
    assert found is not None
    return found.reason if found.state == "failed" else None


@pytest.mark.parametrize("name", WATCHED)
async def test_a_sandbox_that_takes_uncounted_kernel_memory_is_ended(node, box, name):
    instance, neighbour = await box(limits=Limits(memory_bytes=MEMORY)), await box()

    expected, program = WATCHED[name]
    await attack(instance, program)
    reason = await eventually(lambda: has_failed(node, instance.uid), seconds=60)

    assert expected in reason
    assert (await run(neighbour, "echo fine")).out == "fine\n"


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


@pytest.mark.parametrize("name", kernel_memory.REFUSED)
async def test_memory_that_is_charged_to_nobody_is_refused(attacker, name):
    expected, program = kernel_memory.REFUSED[name]
    indented = "\n".join(f"    {line}" for line in program.splitlines())
    caught = "except OSError as problem:\n    print(errno.errorcode[problem.errno])"
    code = base64.b64encode(f"{PRELUDE}\ntry:\n{indented}\n{caught}".encode()).decode()
    outcome = await run(attacker, f"echo {code} | base64 -d | python3 -")
    assert outcome.out == f"{expected}\n", outcome


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
    assert 8 << 20 < charged < ALLOWED * 1.25
    assert (await run(instance, "echo fine")).out == "fine\n"


async def _exists(instance: Instance, path: str) -> bool:
    return (await run(instance, f"test -e {path}")).status == 0
