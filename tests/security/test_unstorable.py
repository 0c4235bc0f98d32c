"""Real sandboxes that CRIU cannot store: errors, state, quota and timeout."""

import asyncio
import time

import pytest

from paddock.kit.errors import UnstorableError
from paddock.runtime.port import Blueprint, Instance, InstanceState
from tests.gateway.test_real_sandboxes import hibernating
from tests.installation import Box, Installation
from tests.runtime.local.inside import begin, run
from tests.runtime.local.nodes import TestNode, eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

_COUNT = """
import os, time, threading
def count():
    n = 0
    while True:
        n += 1
        with open("/tmp/count.new", "w") as file:
            file.write(str(n))
        os.rename("/tmp/count.new", "/tmp/count")
        time.sleep(0.02)
"""
_TRACED = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
child = os.fork()
if child == 0:
    libc.ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
os.waitpid(child, os.WUNTRACED)
"""
_NETLINK = """
import socket, struct
sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
sock.bind((0, 0))
sock.send(struct.pack("=IHHIIBxxxIII", 32, 18, 0x301, 1, 0, 0, 0, 0, 0))
"""
_CORKED = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect(("127.0.0.1", 9))
sock.setsockopt(socket.IPPROTO_UDP, 1, 1)
sock.send(b"x")
"""
UNSTORABLE = {
    "traced": (_TRACED, r"process \d+ \(python3\) is traced by process \d+ \(python3\)"),
    "netlink": (_NETLINK, r"socket has data to read.*\[process \d+ \(python3\)\]"),
    "corked": (_CORKED, r"corked dgram socket.*\[process \d+ \(python3\)\]"),
}


def program(part: str) -> str:
    """Return a script that counts, after it has made a sandbox unstorable."""
    return f"{_COUNT}{part}\ncount()\n"


async def counted(instance: Instance) -> int:
    return int((await run(instance, "cat /tmp/count")).out or 0)


async def counting(instance: Instance, part: str) -> int:
    """Start the program in a sandbox; return its pid inside once it counts."""
    await run(instance, f"cat > /tmp/program.py <<'EOF'\n{program(part)}\nEOF")
    pid = await begin(instance, "exec /usr/bin/python3 /tmp/program.py")

    async def is_counting() -> bool:
        return await counted(instance) > 0

    await eventually(is_counting, seconds=20)
    return pid


def stored_files(node: TestNode) -> list[str]:
    """Return what is stored of memories, and the ids of checkpoints."""
    found = [str(path) for path in node.state.glob("storage/**/memory/*/*/*")]
    return found + [str(path) for path in node.state.glob("checkpoints/*")]


@pytest.mark.parametrize("what", UNSTORABLE)
async def test_a_failed_dump_is_quick_leaves_nothing_and_changes_nothing(node, what) -> None:
    part, reason = UNSTORABLE[what]
    uid = f"unstorable-{what}"
    box = await node.runtime.create(Blueprint(uid=uid, image="host"))
    try:
        pid = await counting(box, part)
        before = stored_files(node)
        child = Blueprint(uid=f"{uid}-child", image="host")
        for attempt in (
            lambda: node.runtime.hibernate(uid),
            lambda: node.runtime.snapshot(uid, f"{uid}-snap", memory=True, keep_running=True),
            lambda: node.runtime.fork(uid, (child,)),
        ):
            began = time.monotonic()
            with pytest.raises(UnstorableError, match=reason):
                await attempt()
            assert time.monotonic() - began < 2
            assert stored_files(node) == before
            # The same process continues.
            now = await counted(box)
            await asyncio.sleep(0.3)
            assert await counted(box) > now
        await node.runtime.freeze(uid)
        with pytest.raises(UnstorableError, match=reason):
            await node.runtime.hibernate(uid)
        instance = await node.runtime.inspect(uid)
        assert instance is not None
        assert instance.state is InstanceState.FROZEN
        await node.runtime.thaw(uid)
        # Without it, the sandbox can be stored.
        await run(box, f"kill -9 {pid}; pkill -9 -f program.py; sleep 0.2")
        assert (await node.runtime.hibernate(uid)).state is InstanceState.HIBERNATED
        assert (await node.runtime.restore(uid)).state is InstanceState.RUNNING
    finally:
        await node.runtime.destroy(uid)


async def shown(paddock: Installation, box: Box) -> str:
    return (await paddock.api("GET", f"/sandboxes/{box.id}"))["state"]


async def start_program(paddock: Installation, box: Box, part: str) -> None:
    await paddock.run(box, f"cat > /tmp/program.py <<'EOF'\n{program(part)}\nEOF")
    await paddock.run(
        box, "setsid /usr/bin/python3 /tmp/program.py </dev/null >/dev/null 2>&1 & sleep 1"
    )


async def refused(paddock: Installation, path: str, body: object) -> tuple[int, str]:
    headers = {"X-API-Key": paddock.secrets.api_key}
    async with paddock.http.post(paddock.url + path, json=body, headers=headers) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("what", ["traced", "netlink"])
async def test_an_unstorable_sandbox_obeys_its_timeout(what) -> None:
    part = UNSTORABLE[what][0]
    async with Installation(pool_size=1) as paddock:
        box = await paddock.create(timeout=60, autoPause=True)
        path = await hibernating(paddock, box.id)
        await start_program(paddock, box, part)
        # Snapshots and forks are refused with the process.
        for call in ("snapshots", "fork"):
            began = time.monotonic()
            status, body = await refused(paddock, f"/sandboxes/{box.id}/{call}", {})
            assert time.monotonic() - began < 2
            assert status == 409, body
            assert "(python3)" in body
        # A pause freezes it, and it is paused only then.
        states: list[str] = []

        async def watch() -> None:
            while True:
                listed = await paddock.api("GET", "/v2/sandboxes?state=paused")
                frozen = (await paddock.kube("GET", path))["status"]["phase"]
                states.append(f"{len(listed)} {frozen}")

        watching = asyncio.ensure_future(watch())
        began = time.monotonic()
        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
        assert time.monotonic() - began < 5
        watching.cancel()
        assert not {"1 Running", "1 Pausing"} & set(states), states
        status = (await paddock.kube("GET", path))["status"]
        assert (status["phase"], status["pauseStrategy"]) == ("Paused", "Freeze")
        [condition] = [one for one in status["conditions"] if one["type"] == "Storable"]
        assert (condition["status"], condition["reason"]) == ("False", "Unstorable")
        assert "(python3)" in condition["message"]
        assert await shown(paddock, box) == "paused"
        # The same process continues after a resume, with the timeout of the resume.
        await paddock.api("POST", f"/sandboxes/{box.id}/resume", {"timeout": 4, "autoPause": True})
        began = time.monotonic()
        first = int(await paddock.run(box, "cat /tmp/count"))
        assert int(await paddock.run(box, "sleep 0.3; cat /tmp/count")) > first > 0

        async def is_paused() -> bool:
            return await shown(paddock, box) == "paused"

        # At its timeout it is frozen again, and stays so.
        await eventually(is_paused, seconds=10)
        assert 3 < time.monotonic() - began < 8
        await asyncio.sleep(3)
        status = (await paddock.kube("GET", path))["status"]
        assert (status["phase"], status["pauseStrategy"]) == ("Paused", "Freeze")
        await paddock.api("DELETE", f"/sandboxes/{box.id}")
