"""envd in sandboxes that a node created, behind the node's listeners."""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from paddock.runtime.port import AgentConfig, Blueprint, Instance, Limits
from tests.envd.rig import Stream, Wire, end, frame, output
from tests.envd.test_e2b_sdk import sdk_python
from tests.runtime.local.nodes import TestNode, envd_of, eventually
from tests.sdk.clients import LEAVING

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(240)]
__all__ = ["sdk_python"]

TOKEN = "tok"
MARK = "outside and secret"


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    if os.geteuid() != 0:
        pytest.skip("making sandboxes needs root")
    made = TestNode()
    asyncio.run(_start(made))
    yield made
    asyncio.run(made.stop())


async def _start(node: TestNode) -> None:
    await node.start()
    node.runtime.close()


@pytest.fixture
async def box(node: TestNode) -> AsyncIterator[Instance]:
    agent = AgentConfig(access_token=TOKEN, sandbox_id="ireal", template_id="host")
    made = await node.runtime.create(
        Blueprint(uid="envd-test", image="host", agent=agent, limits=Limits(memory_bytes=512 << 20))
    )
    yield made
    await node.runtime.destroy("envd-test")
    node.runtime.close()


async def dial(box: Instance) -> Wire:
    assert box.address.envd is not None
    path = box.address.envd.removeprefix("unix:")
    return Wire(*await asyncio.open_unix_connection(path, limit=1 << 20))


async def request(box: Instance, method: str, target: str, body: bytes = b"", **headers: str):
    wire = await dial(box)
    try:
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        await wire.send(method, target, {"x-access-token": TOKEN, **named}, body)
        return await wire.response(method)
    finally:
        wire.close()


async def start(box: Instance, script: str, **more: object) -> Stream:
    wire = await dial(box)
    message = {"process": {"cmd": "/bin/bash", "args": ["-c", script]}, **more}
    headers = {"content-type": "application/connect+json", "x-access-token": TOKEN}
    await wire.send("POST", "/process.Process/Start", headers, frame(message))
    await wire.head()
    return Stream(wire)


async def run(box: Instance, script: str) -> bytes:
    stream = await start(box, script)
    events = await stream.rest()
    stream.close()
    end(events)
    return output(events)


async def run_client(box: Instance, sdk_python: Path, script_name: str) -> str:
    """Run a script with E2B's SDK against the envd of a sandbox; return its output."""
    assert box.address.envd is not None
    path = box.address.envd.removeprefix("unix:")

    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.add(asyncio.current_task())  # type: ignore[arg-type]
        far_reader, far_writer = await asyncio.open_unix_connection(path)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    sink.write(data)
                    await sink.drain()
            with contextlib.suppress(OSError, RuntimeError):
                sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    script = Path(__file__).parent / "sdk_scripts" / script_name
    process = await asyncio.create_subprocess_exec(
        sdk_python,
        LEAVING,
        script,
        f"http://127.0.0.1:{port}",
        TOKEN,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    server.close()
    if relays:
        await asyncio.wait(relays, timeout=30)
    assert process.returncode == 0, said.decode()
    return said.decode().strip()


async def test_an_sdk_session_succeeds_in_a_sandbox(box: Instance, sdk_python: Path) -> None:
    said = await run_client(box, sdk_python, "sdk_session.py")

    assert said.endswith("done"), said


async def test_a_command_that_uses_up_the_memory_is_explained(
    node: TestNode, sdk_python: Path
) -> None:
    agent = AgentConfig(access_token=TOKEN, sandbox_id="ismall", template_id="host")
    limits = Limits(memory_bytes=64 << 20)
    box = await node.runtime.create(
        Blueprint(uid="small", image="host", agent=agent, limits=limits)
    )
    events = node.runtime.watch()
    seen = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)  # the watch is sent

    said = await run_client(box, sdk_python, "out_of_memory.py")

    assert said.endswith("done"), said
    cause = "the sandbox used its 64 MiB of memory"
    event = await asyncio.wait_for(seen, 30)
    assert event.reason == f"processes were killed: {cause}"
    assert event.memory_kills >= 1
    logged = [(line.level, line.message) for line in await node.runtime.logs(box.uid)]
    assert ("warn", f"killed: {cause}") in logged
    assert "processes of a sandbox were killed for lack of memory" in node.log.read_text()
    await events.aclose()
    await node.runtime.destroy(box.uid)
    node.runtime.close()


async def test_pids_ids_and_environment_are_those_of_the_sandbox(box: Instance) -> None:
    stream = await start(box, "echo $$ $E2B_SANDBOX_ID $(cat /run/e2b/.E2B_SANDBOX_ID) $(id -un)")
    events = await stream.rest()
    stream.close()

    pid = events[0]["start"]["pid"]
    assert output(events).split() == [str(pid).encode(), b"ireal", b"ireal", b"user"]
    assert pid < 1000


async def test_envd_is_invisible_from_inside(box: Instance) -> None:
    seen = await run(box, "cat /proc/[0-9]*/comm /proc/net/unix; ls /proc/1/fd 2>&1 | head -3")

    assert b"envd" not in seen
    assert b"python" not in seen


async def test_metrics_are_those_of_the_sandbox(box: Instance) -> None:
    holding = await start(
        box, "x=$(head -c 40000000 /dev/zero | tr '\\0' a); echo held; sleep 1000; :"
    )
    while "data" not in await holding.event():
        pass
    told = (await request(box, "GET", "/metrics")).json()
    holding.close()

    assert told["mem_total"] == 512 << 20
    assert 35 << 20 < told["mem_used"] < 200 << 20


async def test_disk_usage_includes_written_and_inherited_bytes(node: TestNode) -> None:
    def plan(uid: str, **more: str) -> Blueprint:
        agent = AgentConfig(access_token=TOKEN, sandbox_id=uid)
        limits = Limits(disk_bytes=1 << 30)
        return Blueprint(uid=uid, image="host", agent=agent, limits=limits, **more)

    async def tells(box: Instance, least: int) -> bool:
        told = (await request(box, "GET", "/metrics")).json()
        if "disk_used" not in told:
            pytest.skip("nothing counts here what a sandbox writes")
        usage = await node.runtime.usage(box.uid)
        assert told["disk_total"] == usage.disk_total_bytes == 1 << 30
        return told["disk_used"] == usage.disk_used_bytes >= least

    async def store(box: Instance) -> None:
        """Sync: blocks are counted when they are written, as for a snapshot."""
        await node.runtime.snapshot(box.uid, f"{box.uid}-stored", memory=False, keep_running=True)

    try:
        first = await node.runtime.create(plan("disk-1"))
        await run(first, "head -c 20000000 /dev/urandom > ~/a")
        await store(first)
        await eventually(lambda: tells(first, 20_000_000), seconds=90)
        second = await node.runtime.create(plan("disk-2", checkpoint_id="disk-1-stored"))
        await run(second, "head -c 5000000 /dev/urandom > ~/b")
        await store(second)
        await eventually(lambda: tells(second, 25_000_000), seconds=90)
    finally:
        for uid in ("disk-1", "disk-2"):
            await node.runtime.destroy(uid)
            await node.runtime.delete_checkpoint(f"{uid}-stored")
        node.runtime.close()


async def test_links_and_renames_during_calls_never_lead_outside(
    box: Instance, tmp_path: Path
) -> None:
    """A sandbox replaces a directory by a link to `/` while files are read and written."""
    secret = tmp_path / "secret"
    secret.write_text(MARK)
    (tmp_path / "canary").touch()
    up = "../" * 12
    evil = f"{up}{str(secret.parent)[1:]}"
    await run(box, f"cd ~; mkdir -p real; ln -sfn {evil} evil; echo inside > real/secret")
    racer = await start(
        box, "cd ~; while :; do mv real swap; mv evil real; mv real evil; mv swap real; done"
    )
    await racer.event()
    rpc = {"content_type": "application/json"}
    raw = {"content_type": "application/octet-stream"}
    deadline = asyncio.get_running_loop().time() + 2
    rounds = 0
    while rounds <= 5 or asyncio.get_running_loop().time() < deadline:
        rounds += 1
        got = await request(box, "GET", "/files?path=real/secret")
        assert MARK not in got.body.decode()
        await request(box, "POST", "/files?path=real/secret", b"overwritten", **raw)
        listed = await request(
            box, "POST", "/filesystem.Filesystem/ListDir", b'{"path":"real","depth":3}', **rpc
        )
        assert "canary" not in listed.body.decode()
        body = json.dumps({"path": "evil/secret"}).encode()
        await request(box, "POST", "/filesystem.Filesystem/Remove", body, **rpc)
    racer.close()

    assert secret.read_text() == MARK
    assert sorted(p.name for p in tmp_path.iterdir()) == ["canary", "secret"]


async def test_a_killed_envd_comes_back_and_finds_its_commands(
    node: TestNode, box: Instance
) -> None:
    stream = await start(box, "while read line; do echo got $line; done", tag="t", stdin=True)
    pid = (await stream.event())["start"]["pid"]
    victim = await envd_of(node, box.uid)
    os.kill(victim, 9)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await stream.rest()
    stream.close()

    listed = await request(
        box, "POST", "/process.Process/List", b"{}", content_type="application/json"
    )

    assert [(p["pid"], p["tag"]) for p in listed.json()["processes"]] == [(pid, "t")]
    assert await envd_of(node, box.uid, other_than=victim)


async def test_a_stream_of_a_destroyed_sandbox_is_reset(node: TestNode, box: Instance) -> None:
    """Clients treat a clean end without an end frame as a server error."""
    stream = await start(box, "exec sleep 600")
    await stream.event()

    await node.runtime.destroy(box.uid)

    async with asyncio.timeout(30):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await stream.rest()
    stream.close()


async def call(box: Instance, method: str, message: object) -> dict:
    body = json.dumps(message).encode()
    path = f"/process.Process/{method}"
    answer = await request(box, "POST", path, body, content_type="application/json")
    assert answer.status == 200, answer
    return answer.json()


async def connect(box: Instance, tag: str) -> Stream:
    wire = await dial(box)
    headers = {"content-type": "application/connect+json", "x-access-token": TOKEN}
    message = frame({"process": {"tag": tag}})
    await wire.send("POST", "/process.Process/Connect", headers, message)
    await wire.head()
    return Stream(wire)


async def serves_what_survived(box: Instance, pids: dict[str, int]) -> None:
    """Check list, output, input, end-of-file, terminal and signals of earlier processes."""
    listed = (await call(box, "List", {}))["processes"]
    assert {one["tag"]: one["pid"] for one in listed} == pids
    heard = {tag: await connect(box, tag) for tag in pids}
    for tag, stream in heard.items():
        assert (await stream.event())["start"]["pid"] == pids[tag]

    async def say(tag: str, kind: str, text: bytes) -> None:
        piece = {kind: base64.b64encode(text).decode()}
        await call(box, "SendInput", {"process": {"tag": tag}, "input": piece})

    async with asyncio.timeout(30):
        await say("pipe", "stdin", b"hello\n")
        assert output([await heard["pipe"].event()]) == b"kept hello\n"
        await call(box, "CloseStdin", {"process": {"tag": "pipe"}})
        assert end(await heard["pipe"].rest())["exitCode"] == 4
        await say("terminal", "pty", b"echo $((6*7)) $kept; exit 5\n")
        events = await heard["terminal"].rest()
        assert b"42 kept" in output(events, "pty")
        assert end(events)["exitCode"] == 5
        kill = {"process": {"tag": "sleeper"}, "signal": "SIGNAL_SIGKILL"}
        await call(box, "SendSignal", kill)
        assert end(await heard["sleeper"].rest())["status"] == "signal: killed"
    assert (await call(box, "List", {})) == {}
    for stream in heard.values():
        stream.close()


@pytest.mark.parametrize("how", ["frozen and thawed", "hibernated and restored", "forked"])
async def test_surviving_processes_are_listed_read_fed_and_ended(
    node: TestNode, box: Instance, how: str
) -> None:
    if not (await node.runtime.capabilities()).can_checkpoint:
        pytest.skip("memory cannot be stored on this machine")
    loop = "kept=kept; while read line; do echo $kept $line; done; exit 4"
    started = {
        "pipe": await start(box, loop, tag="pipe", stdin=True),
        "sleeper": await start(box, "exec sleep 600", tag="sleeper"),
        "terminal": await start(
            box,
            "kept=kept exec bash --norc -i",
            tag="terminal",
            pty={"size": {"cols": 80, "rows": 24}},
        ),
    }
    pids = {tag: (await stream.event())["start"]["pid"] for tag, stream in started.items()}
    for stream in started.values():
        stream.close()

    if how == "frozen and thawed":
        await node.runtime.freeze(box.uid)
        served = [await node.runtime.thaw(box.uid)]
    elif how == "hibernated and restored":
        await node.runtime.hibernate(box.uid)
        served = [await node.runtime.restore(box.uid)]
    else:
        agent = AgentConfig(access_token=TOKEN, sandbox_id="ifork", template_id="host")
        (child,) = await node.runtime.fork(box.uid, (Blueprint(uid="envd-fork", agent=agent),))
        assert isinstance(child, Instance), child
        served = [child, box]

    try:
        for one in served:
            await serves_what_survived(one, pids)
    finally:
        await node.runtime.destroy("envd-fork")
