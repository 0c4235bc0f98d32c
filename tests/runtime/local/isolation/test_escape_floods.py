"""Floods by root inside a sandbox: its limits hold, and other sandboxes are not affected."""

import asyncio
from pathlib import Path

import pytest

from paddock.runtime.local.kernel.cgroups import Cgroups
from paddock.runtime.local.kernel.nproc_reserve import reserve_size
from paddock.runtime.port import Limits
from tests.runtime.contract import first_event_of
from tests.runtime.local.inside import begin, run, succeeds
from tests.runtime.local.nodes import TestNode, eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PYTHON = "/usr/bin/python3"
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.05)
"""
UNTIL_ENOUGH = "while not os.path.exists('/tmp/enough'): time.sleep(0.05)"


async def group_of(node: TestNode, uid: str) -> tuple[Cgroups, str]:
    """Return the cgroups of a node and the name of a sandbox's cgroup."""
    facts = await node.facts()
    init = Path("/proc", str(facts["inits"][uid]))
    name = (init / "cgroup").read_text().split()[-1].rpartition("/")[2]
    return Cgroups(facts["node_id"]), name


async def test_a_fork_bomb_stays_within_its_limit_and_other_sandboxes_respond(node, box):
    bomber, neighbour = await box(limits=Limits(pids=64)), await box()
    bomb = asyncio.ensure_future(
        run(bomber, "b() { b | b & }; for i in 1 2 3 4; do b 2>/dev/null; done; sleep 99")
    )
    groups, group = await group_of(node, bomber.uid)
    await eventually(lambda: groups.usage(group).pids > 32)
    assert (await run(neighbour, "echo fine")).out == "fine\n"
    assert groups.usage(group).pids <= 64
    bomb.cancel()
    await asyncio.wait([bomb])


@pytest.mark.parametrize("user", ["root", "user"])
async def test_a_kill_command_can_start_in_a_sandbox_full_of_processes(node, box, user):
    instance = await box(limits=Limits(pids=64))
    await begin(instance, f"exec {PYTHON} -c '{BOMB}'", user=user)
    groups, group = await group_of(node, instance.uid)
    # The kernel counts envd as a process of the sandbox's user, though it is not in the cgroup.
    await eventually(lambda: groups.usage(group).pids > 64 - reserve_size(64) - 4, seconds=60)

    assert (await run(instance, "echo in; kill -9 -1", user=user)).out == "in\n"

    assert (await run(instance, "echo $(echo alive)", user=user)).out == "alive\n"
    await eventually(lambda: groups.usage(group).pids < 8)


async def test_a_command_that_cannot_start_reports_the_reason(box):
    instance = await box(limits=Limits(pids=8))
    await begin(instance, "for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done; wait")
    message = ""
    for _ in range(8):  # the last ones use up the reserve
        try:
            await begin(instance, "exec sleep 1000")
        except AssertionError as problem:
            message = str(problem)
    assert "as many processes as it may have" in message
    assert "resource_exhausted" in message  # a retry may succeed


async def test_a_memory_bomb_is_killed_and_reported(node, box):
    instance, neighbour = await box(limits=Limits(memory_bytes=64 << 20)), await box()
    events = node.runtime.watch()
    seen = asyncio.ensure_future(first_event_of(instance.uid, events))
    await asyncio.sleep(0)  # the watch is sent
    outcome = await run(instance, f"{PYTHON} -c 'x = bytearray(512 << 20)'")
    assert outcome.status != 0
    assert (await run(neighbour, "echo fine")).out == "fine\n"
    assert (await run(instance, "echo alive")).out == "alive\n"
    event = await asyncio.wait_for(seen, 30)
    assert "memory" in event.reason
    await events.aclose()


async def test_a_full_disk_affects_only_its_own_sandbox(node, box):
    if not (await node.runtime.capabilities()).can_limit_disk:
        pytest.skip("disk use cannot be limited on this machine")
    filler, neighbour = await box(limits=Limits(disk_bytes=32 << 20)), await box()
    fill = "dd if=/dev/zero of=/tmp/fill bs=1M count=200 2>&1; stat -c %s /tmp/fill"
    size = int((await run(filler, fill)).out.split()[-1])
    assert size <= 40 << 20
    assert await succeeds(neighbour, "dd if=/dev/zero of=/tmp/x bs=1M count=8 2>/dev/null")


async def test_empty_files_count_against_the_disk_limit(node, box):
    if not (await node.runtime.capabilities()).can_limit_disk:
        pytest.skip("disk use cannot be limited on this machine")
    instance, neighbour = await box(limits=Limits(disk_bytes=4 << 20)), await box()
    script = f"""{PYTHON} - <<'END'
import os
os.makedirs('/tmp/many')
try:
    for i in range(300000):
        os.close(os.open(f'/tmp/many/{{i:040d}}', os.O_CREAT | os.O_WRONLY))
except OSError as e:
    print('stopped', i)
END"""
    assert "stopped" in (await run(instance, script, timeout=100)).out
    assert await succeeds(neighbour, "mkdir /tmp/mine && touch /tmp/mine/one")


async def test_running_out_of_descriptors_affects_only_its_own_sandbox(box):
    instance, neighbour = await box(), await box()
    script = f"""{PYTHON} - <<'END'
import os, time
held = []
try:
    while True:
        held.append(os.open('/dev/null', 0))
except OSError:
    os.close(held.pop())
    held.append(os.open('/tmp/exhausted', os.O_CREAT))
{UNTIL_ENOUGH}
print('exhausted', len(held) > 100)
END"""
    holding = asyncio.ensure_future(run(instance, script, timeout=100))
    await eventually(lambda: succeeds(instance, "test -e /tmp/exhausted"), seconds=60)
    assert (await run(neighbour, "echo fine")).out == "fine\n"
    assert (await run(instance, "echo alive; touch /tmp/enough")).out == "alive\n"
    assert "exhausted True" in (await holding).out


async def test_very_many_inotify_watches_do_not_affect_other_sandboxes(box):
    """The kernel counts watches for the creator of the user namespace: for all sandboxes."""
    instance, neighbour = await box(), await box()
    open_many = """
import ctypes, os
def watches(count):
    return [ctypes.CDLL(None).inotify_init1(0) for _ in range(count)]
"""
    script = f"""{PYTHON} - <<'END'
{open_many}
import time
held = watches(300)
open('/tmp/held', 'w').close()
{UNTIL_ENOUGH}
print('held', min(held) > 0)
END"""
    greedy = asyncio.ensure_future(run(instance, script, timeout=100))
    await eventually(lambda: succeeds(instance, "test -e /tmp/held"), seconds=60)
    assert await succeeds(neighbour, f"{PYTHON} -c '{open_many}assert watches(1)[0] > 0'")
    await run(instance, "touch /tmp/enough")
    assert (await greedy).out == "held True\n"


async def test_running_out_of_terminals_does_not_affect_other_sandboxes(box):
    instance, neighbour = await box(), await box()
    script = f"""{PYTHON} - <<'END'
import os, time
held = []
try:
    while len(held) < 5000:
        held.append(os.openpty())
except OSError:
    pass
open('/tmp/held', 'w').close()
{UNTIL_ENOUGH}
print(len(held))
END"""
    greedy = asyncio.ensure_future(run(instance, script, timeout=100))
    await eventually(lambda: succeeds(instance, "test -e /tmp/held"), seconds=60)
    assert await succeeds(neighbour, f"{PYTHON} -c 'import os; os.openpty()'")
    await run(instance, "touch /tmp/enough")
    held = int((await greedy).out)
    assert 16 <= held <= 1024


async def test_shared_memory_counts_against_the_limit(box):
    instance = await box(limits=Limits(memory_bytes=64 << 20))
    outcome = await run(instance, "dd if=/dev/zero of=/dev/shm/x bs=1M count=400 2>&1; echo done")
    assert "No space left" in outcome.out or outcome.status != 0
