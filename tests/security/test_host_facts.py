"""What a sandbox can read about the machine and about other sandboxes."""

import os
from pathlib import Path

import pytest

from paddock.runtime.local.launch.protocol import SHOWN_TREES
from tests.runtime.local.inside import run
from tests.security.battery import facts

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

_WALK = """
import os, sys
wanted = [word for word in sys.argv[1:]]
def walk(top):
    for directory, names, files in os.walk(top):
        if directory == "/proc":
            names[:] = [one for one in names if not one.isdigit() and "self" not in one]
        for name in files:
            yield os.path.join(directory, name)
for path in (*walk("/proc"), *walk("/sys")):
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        continue
    try:
        text = os.read(handle, 1 << 16)
    except OSError:
        text = b""
    finally:
        os.close(handle)
    for word in wanted:
        if word.encode() in text:
            print(path, word)
"""
_TOOLS = [
    *(
        "ip addr show lo",
        "ip route",
        "ss -tlnp",
        "ss -s",
        "free -b",
        "top -bn1",
        "ps aux",
        "uptime",
    ),
    *("lscpu", "nproc", "df /", "cat /proc/version /proc/filesystems", "getconf _NPROCESSORS_ONLN"),
    "cat /sys/kernel/mm/transparent_hugepage/enabled /sys/class/net/lo/mtu",
    *("lsblk", "numactl --show", "lspci", "python3 -c 'import os; os.sched_getaffinity(0)'"),
    *("ls /sys/fs/cgroup", "sysctl kernel.pid_max", "vmstat"),
]


async def test_files_about_the_machine_are_empty(attacker):
    script = f"cd /proc; cat {' '.join(facts.FILES)} 2>/dev/null"
    assert (await run(attacker, f"({script}) | wc -c")).out.strip() == "0"
    assert not (await run(attacker, "grep -v ' 0$' /proc/vmstat")).out
    found = await run(attacker, f"find {' '.join(facts.TREES)} -mindepth 1 2>/dev/null | head")
    assert found.out == ""


async def test_sys_has_only_the_parts_that_are_shown(attacker):
    shown = [f"/{path}" for path in SHOWN_TREES]
    skipped = " -o ".join(f"-path {path}" for path in shown)
    # Not `-xdev`: other file systems below /sys would be found, too.
    rest = await run(attacker, rf"find /sys \( {skipped} \) -prune -o -print")
    empty = {line for line in rest.out.splitlines() if not _is_above(line, shown)}
    assert rest.status == 0
    assert empty == {
        *("/sys/block", "/sys/bus", "/sys/dev", "/sys/dev/block", "/sys/dev/char"),
        *("/sys/devices/system/node", "/sys/firmware", "/sys/fs", "/sys/fs/cgroup"),
        *("/sys/module", "/sys/power"),
    }
    for path in shown:
        assert (await run(attacker, f"ls {path}")).out, path


def _is_above(path: str, shown: list[str]) -> bool:
    return any(one.startswith(f"{path}/") for one in shown)


async def test_nothing_below_sys_can_be_changed_or_uncovered(attacker):
    for change in (
        *("mkdir /sys/new", "touch /sys/block/new", "rmdir /sys/power", "umount /sys"),
        *("umount -l /sys", "umount /sys/class/net", "mv /sys/fs /sys/fs2"),
        "echo 1 > /sys/devices/system/cpu/cpu0/uevent",
    ):
        assert (await run(attacker, change)).status != 0, change
    types = "grep -E ' (/sys|/sys/.*) ' /proc/self/mountinfo | grep -v ' ro,'"
    assert (await run(attacker, types)).out == ""


async def test_no_file_names_disks_paths_or_the_host_name(node, attacker):
    disks = {
        path.name for path in Path("/sys/block").iterdir() if path.name.startswith(("vd", "sd"))
    }
    words = {str(node.state), os.uname().nodename + ".", *(f"/dev/{disk}" for disk in disks)}
    words |= {path.name for path in Path("/sys/fs/btrfs").glob("*-*")}
    asked = " ".join(sorted(words))
    outcome = await run(attacker, f"/usr/bin/python3 - {asked} <<'EOF'\n{_WALK}\nEOF")
    assert outcome.status == 0, outcome
    assert outcome.out == ""


@pytest.mark.parametrize("age", ["new"], indirect=True)
async def test_tools_that_read_proc_and_sys_still_work(attacker):
    for tool in _TOOLS:
        outcome = await run(attacker, f"command -v {tool.split()[0]} >/dev/null || exit 0; {tool}")
        assert outcome.status == 0, (tool, outcome)
