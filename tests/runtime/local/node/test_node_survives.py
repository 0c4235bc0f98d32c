"""SIGKILL of the node and its helpers, also under load: sandboxes keep running, nothing leaks."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess

import pytest

from paddock.kit.errors import PaddockError, UnavailableError
from paddock.runtime.local.node.records import start_ticks
from paddock.runtime.port import AgentConfig, Blueprint, InstanceState, Limits
from tests.faults.clients import replayed_by, seed_of
from tests.runtime.contract import first_event_of
from tests.runtime.local.inside import begin, health, run
from tests.runtime.local.nodes import (
    TestNode,
    envd_of,
    eventually,
    resource_name_of,
    traces,
    unexpected_traces,
)

pytestmark = [pytest.mark.sandbox, pytest.mark.faults, pytest.mark.timeout(240)]

LONG = "/".join(["a-directory-somebody-named-at-length"] * 3)
"""Longer than a socket path may be."""
LOSE_THE_FIRST_CLONE = """
from paddock.runtime.local.launch import launcher
real, lost = launcher.SandboxLauncher.prepare, []
async def prepare(self, *given, **named):
    made = await real(self, *given, **named)
    if not lost:
        lost.append(made.pid)
        made.release()
        raise launcher.LauncherError("the launcher died while it worked")
    return made
launcher.SandboxLauncher.prepare = prepare
"""
FAIL_FIRST_CHECK = """
from paddock.runtime.local.kernel.cgroups import Cgroups
real = Cgroups.oom_kills
def stumble(self, name):
    Cgroups.oom_kills = real
    raise OSError(5, "the first look fails")
Cgroups.oom_kills = stumble
"""
FORGET_ENVDS = """
from msgspec import structs
from paddock.runtime.local.node.records import StateDirectory
real = StateDirectory.write
StateDirectory.write = lambda self, record: real(self, structs.replace(record, envd=None))
"""
BREAK_ENVDS = """
import sys
if "paddock.envd.zygote.start" in sys.orig_argv:
    sys.modules["msgspec"] = None
"""
COUNT = "i=0; while true; do i=$((i+1)); echo $i > /tmp/count; sleep 0.02; done"


@pytest.fixture
async def own_node():
    node = TestNode("--envd-idle-seconds", "30")
    await node.start()
    yield node
    await node.stop()


def blueprint(uid: str, **changes) -> Blueprint:
    return Blueprint(uid=uid, image="host", **changes)


async def keeps_counting(instance) -> bool:
    first = int((await run(instance, "cat /tmp/count")).out or 0)

    async def is_further() -> bool:
        return int((await run(instance, "cat /tmp/count")).out or 0) > first

    return await eventually(is_further)


async def test_a_state_directory_may_have_a_long_path():
    node = TestNode(state=LONG)
    await node.start()
    try:
        made = await node.runtime.create(blueprint("d0ecb4a0-7c1f-4a43-a1a5-0f3cbb0e2d6b"))
        assert (await run(made, "echo one")).out == "one\n"

        node.kill()
        await node.start()

        again = await node.runtime.inspect(made.uid)
        assert again.address == made.address
        assert (await run(again, "echo two")).out == "two\n"
    finally:
        await node.stop()


async def test_a_restarted_node_adopts_all_sandboxes(own_node):
    runtime = own_node.runtime
    running = await runtime.create(blueprint("running", start_command=COUNT))
    await runtime.start("running")
    await runtime.configure("running", AgentConfig(access_token="t", env={"X": "1"}))
    await runtime.create(blueprint("frozen"))
    await runtime.freeze("frozen")
    await runtime.create(blueprint("stopped"))
    await runtime.stop("stopped")
    asleep = await runtime.create(blueprint("asleep"))
    await runtime.hibernate("asleep")
    pid = await start_with_token(running)
    envd = await envd_of(own_node, "running")

    own_node.kill()
    os.kill(envd, 0)  # envd outlives the node
    await own_node.start()

    states = {one.uid: one.state for one in await runtime.instances()}
    assert states == {
        "running": "running", "frozen": "frozen", "stopped": "stopped", "asleep": "hibernated",
    }  # fmt: skip
    again = await runtime.inspect("running")
    assert again.address == running.address
    assert (await own_node.facts())["envds"]["running"] == envd
    assert "1\n" in (await run(again, f"kill -0 {pid}; echo $?; echo $X", token="t")).out
    assert (await runtime.thaw("frozen")).state is InstanceState.RUNNING
    # A hibernated sandbox keeps its address reserved.
    assert list((own_node.state / "net").rglob(f"{resource_name_of(own_node, 'asleep')}*"))
    assert (await runtime.restore("asleep")).address.ip == asleep.address.ip
    assert await health(await runtime.inspect("asleep")) == 204


async def start_with_token(instance) -> int:
    outcome = await run(instance, "sleep 1000 >/dev/null 2>&1 & echo $!", token="t")
    return int(outcome.out)


async def test_a_killed_envd_is_replaced_and_finds_its_commands(own_node):
    instance = await own_node.runtime.create(blueprint("a"))
    pid = await begin(instance, COUNT)
    envd = await envd_of(own_node, "a")
    os.kill(envd, signal.SIGKILL)
    assert await keeps_counting(instance)
    assert (await run(instance, f"kill -0 {pid} && echo there")).out == "there\n"
    assert await envd_of(own_node, "a", other_than=envd)


async def test_an_envd_that_a_killed_node_had_not_recorded_is_adopted():
    """envd serves calls before it is recorded; there must not be a second one afterwards."""
    node = TestNode()
    node.prelude = FORGET_ENVDS
    await node.start()
    try:
        instance = await node.runtime.create(blueprint("a"))
        pid = await begin(instance, COUNT)
        await begin(instance, r"printf '\377' > /proc/self/comm; while true; do sleep 1; done")
        envd = await envd_of(node, "a")
        for _ in range(2):  # recorded when it is found the first time
            node.kill()
            node.prelude = ""
            await node.start()
            assert await envd_of(node, "a") == envd
            assert (await run(instance, f"kill -0 {pid} && echo there")).out == "there\n"
    finally:
        await node.stop()


async def test_killed_helpers_are_replaced(own_node):
    before = await own_node.facts()
    os.kill(before["launcher"], signal.SIGKILL)
    os.kill(before["zygote"], signal.SIGKILL)
    for number in range(10):  # more than the warm stock
        instance = await _create_with_retries(own_node.runtime, f"b{number}")
        assert await eventually(lambda instance=instance: _is_healthy(instance))
    after = await own_node.facts()
    assert after["launcher"] not in (None, before["launcher"])
    assert after["zygote"] not in (None, before["zygote"])


async def test_clones_of_a_killed_launcher_are_removed_before_the_error_is_returned():
    node = TestNode("--warm-count", "0")
    node.prelude = LOSE_THE_FIRST_CLONE
    await node.start()
    try:
        with pytest.raises(UnavailableError, match="the launcher died"):
            await node.runtime.create(blueprint("a"))
        assert traces(node.state, node.number)["groups"] == []
        assert await health(await node.runtime.create(blueprint("a"))) == 204
    finally:
        await node.stop()


async def test_monitoring_continues_after_an_error():
    node = TestNode("--warm-count", "0")
    node.prelude = FAIL_FIRST_CHECK
    await node.start()
    try:
        instance = await node.runtime.create(blueprint("a", limits=Limits(memory_bytes=64 << 20)))
        await eventually(lambda: "the first look fails" in node.log.read_text(), seconds=60)
        events = node.runtime.watch()
        seen = asyncio.ensure_future(first_event_of("a", events))
        await asyncio.sleep(0)  # the watch is sent
        await run(instance, "/usr/bin/python3 -c 'x = bytearray(512 << 20)'")
        assert "memory" in (await asyncio.wait_for(seen, 60)).reason
        await events.aclose()
    finally:
        await node.stop()


async def test_callers_get_503_while_envd_cannot_start(tmp_path):
    node = TestNode("--warm-count", "0")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    node.prelude = f"import os; os.environ['PYTHONPATH'] = {path!r}"
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(BREAK_ENVDS)
    await node.start()
    try:
        instance = await node.runtime.create(blueprint("a"))
        answers = await asyncio.gather(*(_call(instance) for _ in range(3)))
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 503 "), answer
            assert b"the zygote of envd does not start" in answer
            assert b"msgspec" in answer
        broken.unlink()
        assert await health(instance) == 204
    finally:
        await node.stop()


async def _call(instance) -> bytes:
    reader, writer = await asyncio.open_unix_connection(instance.address.envd.removeprefix("unix:"))
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: envd\r\nConnection: close\r\n\r\n")
        return await reader.read()
    finally:
        writer.close()


async def _is_healthy(instance) -> bool:
    return await health(instance) == 204


async def _create_with_retries(runtime, uid: str):
    for _ in range(20):
        try:
            return await runtime.create(blueprint(uid))
        except PaddockError:
            await asyncio.sleep(0.1)
    raise AssertionError("no sandbox could be made")


async def test_an_idle_envd_exits_and_is_restarted():
    node = TestNode("--envd-idle-seconds", "0.3", "--warm-count", "0")
    await node.start()
    try:
        instance = await node.runtime.create(blueprint("idle"))
        assert await health(instance) == 204

        async def is_gone() -> bool:
            return "idle" not in (await node.facts())["envds"]

        await eventually(is_gone)
        assert (await run(instance, "echo back")).out == "back\n"
    finally:
        await node.stop()


async def test_kills_at_random_under_load_leak_nothing(own_node, request):
    seed = seed_of(request)
    with replayed_by(f"--faults-seed {seed}"):
        await _kill_at_random(own_node, random.Random(seed))


async def _kill_at_random(own_node: TestNode, chance: random.Random) -> None:
    runtime = own_node.runtime
    steady = await runtime.create(blueprint("steady"))
    await begin(steady, COUNT)
    stop = asyncio.Event()
    done = 0

    async def churn(worker: int) -> None:
        nonlocal done
        number = 0
        while not stop.is_set():
            number += 1
            uid = f"w{worker}-{number}"
            with contextlib.suppress(PaddockError, OSError, AssertionError, TimeoutError):
                instance = await runtime.create(blueprint(uid))
                await health(instance)
                if chance.random() < 0.5:
                    await runtime.freeze(uid)
            with contextlib.suppress(PaddockError):
                await runtime.destroy(uid)
                done += 1

    workers = [asyncio.ensure_future(churn(n)) for n in range(3)]
    for victim in ("launcher", "node", "zygote", "node", "envd", "node"):
        before = done
        await asyncio.sleep(0.3 + chance.random() * 0.7)
        await eventually(lambda before=before: done > before, seconds=60)  # under load
        if victim == "node":
            own_node.kill()
            await own_node.start()
            continue
        facts = await own_node.facts()
        pid = facts["envds"].get("steady") if victim == "envd" else facts[victim]
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    stop.set()
    await asyncio.gather(*workers)

    assert await keeps_counting(steady)
    for instance in await runtime.instances():
        await runtime.destroy(instance.uid)

    left: dict = {}

    async def only_warm_stock_is_left() -> bool:
        nonlocal left
        facts = await own_node.facts()
        left = unexpected_traces(own_node.state, own_node.number, facts)
        return facts["warm"] == 8 and not left

    try:
        await eventually(only_warm_stock_is_left, seconds=60)
    except AssertionError as error:
        raise AssertionError(f"leaked (actual, expected): {left}") from error


async def test_a_creation_interrupted_by_a_kill_can_be_repeated(own_node):
    runtime = own_node.runtime
    for delay in (0.0, 0.005, 0.01, 0.02):
        creating = asyncio.ensure_future(runtime.create(blueprint("again")))
        await asyncio.sleep(delay)
        own_node.kill()
        await own_node.start()
        try:
            instance = await creating  # the driver retries
        except UnavailableError:  # on a busy machine the node may start later than the retries
            instance = await runtime.create(blueprint("again"))
        assert instance.state is InstanceState.RUNNING
        assert await health(instance) == 204
        await runtime.destroy("again")


async def test_hibernation_interrupted_by_a_kill_loses_nothing(own_node):
    runtime = own_node.runtime
    await runtime.create(blueprint("h"))
    for delay in (0.01, 0.05, 0.12):
        instance = await runtime.inspect("h")
        await run(instance, "echo kept > /tmp/kept")
        sleeping = asyncio.ensure_future(runtime.hibernate("h"))
        await asyncio.sleep(delay)
        own_node.kill()
        await own_node.start()
        with contextlib.suppress(PaddockError):
            await sleeping
        now = await runtime.inspect("h")
        assert now.state in ("running", "hibernated", "stopped", "frozen"), now
        if now.state == "frozen":
            await runtime.thaw("h")
        elif now.state != "running":
            await runtime.restore("h")
        assert (await run(await runtime.inspect("h"), "cat /tmp/kept")).out == "kept\n"


async def test_stopped_and_hibernated_sandboxes_survive_a_reboot(own_node):
    runtime = own_node.runtime
    await runtime.create(blueprint("stopped"))
    await run(await runtime.inspect("stopped"), "echo kept > /root/kept")
    await runtime.stop("stopped")
    await runtime.create(blueprint("asleep"))
    await runtime.hibernate("asleep")
    await runtime.create(blueprint("lost"))
    lost = (await own_node.facts())["inits"]["lost"]
    life = start_ticks(lost)
    own_node.kill()
    os.kill(lost, signal.SIGKILL)
    # A killed process exits only when it is scheduled again; a reboot leaves none.
    await eventually(lambda: start_ticks(lost) != life)
    subprocess.run(["umount", "-l", str(own_node.state / "layers")], check=True)
    await own_node.start()
    states = {one.uid: one.state for one in await runtime.instances()}
    assert states == {"stopped": "stopped", "asleep": "hibernated", "lost": "failed"}
    await runtime.restore("stopped")
    assert (await run(await runtime.inspect("stopped"), "cat /root/kept")).out == "kept\n"
    assert await health(await runtime.restore("asleep")) == 204
