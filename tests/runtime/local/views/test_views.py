"""A sandbox sees its own memory, CPUs, load, uptime and boot id, not the machine's."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from paddock.runtime.port import Blueprint, Instance, Limits
from tests.runtime.local.inside import begin, run
from tests.runtime.local.nodes import TestNode, eventually, wait_for_warm

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

SMALL = Limits(cpu_millis=1000, memory_bytes=256 << 20)
MEMORY_LINE = "MemTotal:         262144 kB\n"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOOK = """
free -m | awk '/^Mem/ {print "memory", $2}'
echo nproc $(nproc)
echo python $(python3 -c 'import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))')
echo cpuinfo $(grep -c ^processor /proc/cpuinfo)
echo stat $(grep -c '^cpu[0-9]' /proc/stat)
echo online $(cat /sys/devices/system/cpu/{online,possible,present})
echo load $(cut -d/ -f2 /proc/loadavg | cut -d' ' -f1)
echo boot $(cat /proc/sys/kernel/random/boot_id)
echo uptime $(cut -d. -f1 /proc/uptime)
echo top $(top -bn1 | awk '/^MiB Mem/ {print $4}')
"""


async def look(instance: Instance) -> dict[str, str]:
    outcome = await run(instance, LOOK)
    assert outcome.status == 0, outcome
    return dict(line.split(" ", 1) for line in outcome.out.splitlines())


def sees_own_limits(seen: dict[str, str]) -> bool:
    expected = {
        "memory": "256", "nproc": "1", "python": "1 1", "cpuinfo": "1", "stat": "1",
        "online": "0 0 0", "top": "256.0",
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected
    assert int(seen["load"]) < 20  # its own processes
    return True


async def boot_id(instance: Instance) -> str:
    return (await run(instance, f"cat {BOOT_ID}")).out.strip()


async def has_new_views(node: TestNode, before: int) -> bool:
    return (await node.facts())["views"] not in (None, before)


async def test_tools_show_the_limits_of_a_sandbox(node):
    made = await node.runtime.create(Blueprint(uid="small", image="host", limits=SMALL))
    try:
        seen = await look(made)
        assert sees_own_limits(seen)
        assert seen["boot"] != Path(BOOT_ID).read_text().strip()
        listed = (await run(made, "ps -eo pid=,etimes= | awk '{print $2}'")).out.split()
        assert all(0 <= int(seconds) < 600 for seconds in listed)  # agrees with the uptime
    finally:
        await node.runtime.destroy("small")


async def test_a_warm_sandbox_shows_the_limits_of_its_claim(node):
    await wait_for_warm(node)
    made = await node.runtime.create(Blueprint(uid="claimed", image="host", limits=SMALL))
    try:
        assert sees_own_limits(await look(made))
    finally:
        await node.runtime.destroy("claimed")


async def test_a_limit_of_all_cpus_changes_nothing(node):
    limits = Limits(cpu_millis=0, memory_bytes=0)
    made = await node.runtime.create(Blueprint(uid="whole", image="host", limits=limits))
    try:
        seen = await look(made)
        count = str(len(os.sched_getaffinity(0)))
        assert (seen["nproc"], seen["cpuinfo"], seen["stat"]) == (count, count, count)
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert seen["memory"] == str(pages >> 20)
    finally:
        await node.runtime.destroy("whole")


async def test_memory_and_load_follow_the_processes(node):
    made = await node.runtime.create(Blueprint(uid="live", image="host", limits=SMALL))
    try:
        used = "free -m | awk '/^Mem/ {print $3}'"
        before = int((await run(made, used)).out)
        # The same file stays open, as in `top`: every read must be current.
        script = """
import os, time
file = os.open("/proc/meminfo", os.O_RDONLY)
read = lambda: int(os.pread(file, 4096, 0).split()[4])
before, held, began = read(), b"x" * (100 << 20), time.monotonic()
while read() > before - (95 << 10):
    assert time.monotonic() < began + 1, (before, read())
print("followed")
"""
        assert (await run(made, f"python3 -c '{script}'")).out == "followed\n"
        assert before < 100
        await begin(made, "while :; do :; done")

        async def is_loaded() -> bool:
            return float((await run(made, "cut -d' ' -f1 /proc/loadavg")).out) > 0.05

        await eventually(is_loaded, seconds=20, pause=0.5)
    finally:
        await node.runtime.destroy("live")


async def test_views_survive_hibernation_and_are_own_ones_in_a_fork(node):
    runtime = node.runtime
    made = await runtime.create(Blueprint(uid="kept", image="host", limits=SMALL))
    try:
        # A program that keeps the files open, as they were when it read them.
        await begin(made, "top -b -d 0.2 > /tmp/top")
        first = await look(made)
        await runtime.freeze("kept")
        await runtime.thaw("kept")
        await runtime.hibernate("kept")
        made = await runtime.restore("kept")
        second = await look(made)
        assert sees_own_limits(second)
        assert second["boot"] == first["boot"]
        assert int(first["uptime"]) <= int(second["uptime"]) < 600
        lines = int((await run(made, "wc -l < /tmp/top")).out)

        async def continues() -> bool:
            return int((await run(made, "wc -l < /tmp/top")).out) > lines

        await eventually(continues)
        clone = Blueprint(
            uid="clone", image="host", limits=Limits(cpu_millis=1000, memory_bytes=512 << 20)
        )
        (cloned,) = await runtime.fork("kept", (clone,))
        assert isinstance(cloned, Instance), cloned
        seen = await look(cloned)
        assert (seen["memory"], seen["nproc"], seen["online"]) == ("512", "1", "0 0 0")
        assert sees_own_limits(await look(made))
        await runtime.stop("kept")
        made = await runtime.restore("kept")
        third = await look(made)
        assert sees_own_limits(third)
        assert third["boot"] != first["boot"]
    finally:
        await runtime.destroy("clone")
        await runtime.destroy("kept")


async def test_a_sandbox_cannot_change_its_views(node):
    made = await node.runtime.create(Blueprint(uid="liar", image="host", limits=SMALL))
    try:
        for path in ("/proc/meminfo", "/proc/loadavg", BOOT_ID):
            outcome = await run(made, f"echo x > {path}; umount {path}; chmod 666 {path}")
            assert outcome.status != 0
        assert sees_own_limits(await look(made))
    finally:
        await node.runtime.destroy("liar")


async def test_a_killed_view_server_is_replaced_and_blocks_no_read(node):
    made = await node.runtime.create(Blueprint(uid="served", image="host", limits=SMALL))
    try:
        assert sees_own_limits(await look(made))
        before = (await node.facts())["views"]
        os.kill(before, signal.SIGKILL)
        assert (await look(made))["memory"] == "256"
        await eventually(partial(has_new_views, node, before))
        assert sees_own_limits(await look(made))
    finally:
        await node.runtime.destroy("served")


async def test_a_view_server_that_cannot_start_is_tried_again():
    own = TestNode()
    own.prelude = (
        "from paddock.kit.errors import UnavailableError\n"
        "from paddock.runtime.local.views.server import ViewServer\n"
        "real, calls = ViewServer.start, []\n"
        "def start(self):\n"
        "    calls.append(self)\n"
        "    if len(calls) in (2, 3):\n"
        "        raise UnavailableError('no memory')\n"
        "    real(self)\n"
        "ViewServer.start = start\n"
    )
    await own.start()
    try:
        before = (await own.facts())["views"]
        os.kill(before, signal.SIGKILL)

        async def is_gone() -> bool:
            return (await own.facts())["views"] is None

        await eventually(is_gone)
        # Without a server it sees the machine, not empty files.
        made = await own.runtime.create(Blueprint(uid="early", image="host", limits=SMALL))
        machine = Path("/proc/meminfo").read_text().splitlines(keepends=True)[0]
        assert (await run(made, "head -1 /proc/meminfo")).out in (machine, MEMORY_LINE)
        await eventually(partial(has_new_views, own, before))
        assert sees_own_limits(await look(made))
    finally:
        await own.stop()


async def test_views_that_nobody_has_read_have_contents_while_no_node_runs():
    own = TestNode()
    await own.start()
    try:
        await own.runtime.create(Blueprint(uid="unread", image="host", limits=SMALL))
        facts = await own.facts()
        own.kill()
        await eventually(lambda: not Path(f"/proc/{facts['views']}/root").exists())
        proc = Path(f"/proc/{facts['inits']['unread']}/root/proc")
        assert (proc / "meminfo").read_text().startswith(MEMORY_LINE)
        assert (proc / "stat").read_text().count("cpu") == 2
        assert (proc / "cpuinfo").read_text().count("processor") == 1
        await own.start()
        await own.runtime.destroy("unread")
    finally:
        await own.stop()


async def test_views_outlive_the_node_and_end_with_the_sandbox():
    own = TestNode()
    await own.start()
    try:
        made = await own.runtime.create(Blueprint(uid="adopted", image="host", limits=SMALL))
        first = await look(made)
        own.kill()
        await own.start()
        second = await look(await own.runtime.inspect("adopted") or made)
        assert sees_own_limits(second)
        assert second["boot"] == first["boot"]
        await own.runtime.destroy("adopted")
    finally:
        await own.stop()  # checks that nothing is left


async def test_a_sandbox_hibernated_before_views_existed_is_restored():
    """Until its next start from files, such a sandbox sees the machine."""
    own = TestNode()
    own.prelude = (
        "from paddock.runtime.local.views.views import ResourceViews\n"
        "ResourceViews.binds = lambda *_: ()"
    )
    await own.start()
    try:
        await own.runtime.create(Blueprint(uid="old", image="host", limits=SMALL))
        await own.runtime.hibernate("old")
        own.kill()
        own.prelude = ""
        await own.start()
        made = await own.runtime.restore("old")
        assert (await look(made))["cpuinfo"] == str(os.cpu_count())
        await own.runtime.stop("old")
        assert sees_own_limits(await look(await own.runtime.restore("old")))
    finally:
        await own.stop()


async def test_slots_leave_no_files(node):
    root = node.state / "views"
    await node.runtime.create(Blueprint(uid="gone", image="host", limits=SMALL))
    names = set(root.iterdir())
    await node.runtime.destroy("gone")

    async def one_is_gone() -> bool:
        return bool(names - set(root.iterdir()))

    await eventually(one_is_gone)


async def test_busy_sandboxes_do_not_stay_on_one_cpu(node):
    count = len(os.sched_getaffinity(0))
    if not 1 < count <= 8:
        pytest.skip("needs two to eight CPUs")
    names = [f"busy-{number}" for number in range(count + 1)]
    limits = Limits(cpu_millis=1000)
    try:
        made = {
            name: await node.runtime.create(Blueprint(uid=name, image="host", limits=limits))
            for name in names
        }
        inits = (await node.facts())["inits"]
        on = {name: os.sched_getaffinity(inits[name]) for name in names}
        # More sandboxes than CPUs: two of them share one.
        pair = next([a, b] for a in names for b in names if a < b and on[a] == on[b])
        for name in pair:
            await begin(made[name], "while :; do :; done")
        first, second = (inits[name] for name in pair)
        await eventually(lambda: os.sched_getaffinity(first) != os.sched_getaffinity(second))
    finally:
        for name in names:
            await node.runtime.destroy(name)


async def test_a_sandbox_that_reads_all_the_time_is_slowed_down(node):
    """Else it would use CPU time of the view server beyond its own quota."""
    made = await node.runtime.create(Blueprint(uid="greedy", image="host", limits=SMALL))
    other = await node.runtime.create(Blueprint(uid="modest", image="host", limits=SMALL))
    try:
        script = """
import os, time
file, count, end = os.open("/proc/meminfo", os.O_RDONLY), 0, time.monotonic() + 1
while time.monotonic() < end:
    os.pread(file, 4096, 0)
    count += 1
print(count)
"""
        greedy = asyncio.create_task(run(made, f"python3 -c '{script}'"))
        assert sees_own_limits(await look(other))
        assert 100 < int((await greedy).out) < 5000
    finally:
        await node.runtime.destroy("greedy")
        await node.runtime.destroy("modest")
