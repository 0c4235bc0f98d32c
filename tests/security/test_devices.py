"""Device files: what a sandbox does to its own reaches neither the machine nor another sandbox."""

import os
from pathlib import Path

import pytest

from tests.runtime.local.inside import begin, run, succeeds
from tests.security.battery.attacks import DEVICE_CHANGES

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

_NAMES = ("null", "zero", "full", "random", "urandom", "tty")
_PATHS = " ".join(f"/dev/{name}" for name in _NAMES)
_WATCH = """
import ctypes, os, pathlib, select
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init1(0)
for name in ("null", "zero", "urandom"):
    assert libc.inotify_add_watch(watch, f"/dev/{name}".encode(), 0xfff) >= 0
pathlib.Path("/tmp/watching").touch()
while not os.path.exists("/tmp/look"):
    select.select([], [], [], 0.01)
seen = select.select([watch], [], [], 0)[0]
pathlib.Path("/tmp/seen").write_text(str(len(os.read(watch, 65536)) if seen else 0))
"""


def _facts() -> list[os.stat_result]:
    """Return the facts of the machine's own device files."""
    return [Path("/dev", name).stat() for name in _NAMES]


async def test_device_files_are_the_sandboxs_own(attacker, box):
    other = await box()
    inside = (await run(attacker, f"stat -c '%d:%i' {_PATHS}")).out.split()
    elsewhere = (await run(other, f"stat -c '%d:%i' {_PATHS}")).out.split()
    machine = [f"{one.st_dev}:{one.st_ino}" for one in _facts()]
    assert len({*inside, *elsewhere, *machine}) == 3 * len(_NAMES)


async def test_device_files_work_and_cannot_be_changed(attacker):
    works = (
        "echo x > /dev/null && test $(head -c 9 /dev/zero | tr -d '\\0' | wc -c) = 0 && "
        "! echo x 2>/dev/null > /dev/full && head -c 9 /dev/random | grep -qc . && "
        "test $(stat -c %a /dev/null) = 666 && test -c /dev/tty"
    )
    assert await succeeds(attacker, works)
    assert await succeeds(attacker, works, user="user")
    before = _facts()
    for attempt in DEVICE_CHANGES:
        for name in ("null", "urandom"):
            assert not await succeeds(attacker, f"{attempt} /dev/{name} 2>/dev/null"), attempt
    await run(attacker, f"touch -a {_PATHS}; touch -m {_PATHS}")
    assert [(one.st_mode, one.st_mtime_ns, one.st_ctime_ns) for one in _facts()] == [
        (one.st_mode, one.st_mtime_ns, one.st_ctime_ns) for one in before
    ]


async def test_locks_on_device_files_are_no_channel_between_sandboxes(attacker, box):
    other = await box()
    holder = "exec 9>/dev/null; flock -x 9 && touch /tmp/locked && exec sleep 60"
    pid = await begin(other, holder)
    await run(other, "until test -e /tmp/locked; do sleep 0.01; done")
    assert not await succeeds(other, "flock -n -x /dev/null true")
    assert await succeeds(attacker, "flock -n -x /dev/null true")
    await run(other, f"kill {pid}")


@pytest.mark.parametrize("age", ["new", "woken"], indirect=True)
async def test_a_watch_sees_no_other_user_of_a_device(attacker, box):
    other = await box()
    await run(attacker, "rm -f /tmp/watching /tmp/look /tmp/seen")
    await begin(attacker, f"exec 0</dev/full; /usr/bin/python3 -c '{_WATCH}'")
    await run(attacker, "until test -e /tmp/watching; do sleep 0.01; done; exec sleep 0.05")
    # Starting this command used the sandbox's own /dev/null: read what was seen until then later.
    await run(other, "for i in $(seq 500); do head -c 1 /dev/zero >/dev/null; done")
    for _ in range(500):
        with Path("/dev/zero").open("rb", buffering=0) as zero:
            zero.read(1)
    await run(attacker, "touch /tmp/look; until test -e /tmp/seen; do sleep 0.01; done")
    # Each event has 16 bytes; its own few commands are seen, 1,000 reads of others are not.
    assert int((await run(attacker, "cat /tmp/seen")).out) < 16 * 200
