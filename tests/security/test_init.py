"""Attacks on init, whose end is the end of the sandbox and which starts all commands."""

import json

import pytest

from tests.runtime.local.inside import health, run

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

_ATTACKS = """
import ctypes, errno, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
call = libc.syscall
def name(result):
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
one, mask = (ctypes.c_ulong * 2)(1, 1), (ctypes.c_ulong * 16)(1)
param, attr = (ctypes.c_int * 1)(0), (ctypes.c_uint * 16)(64, 5)
wide = ctypes.c_ulong(7 << 32 | 1)
memory = ctypes.create_string_buffer(4096)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(memory), 4096)
pidfd = os.pidfd_open(1)
found = {
    "limit of CPU time": call(302, 1, 0, one, 0),
    "limit of descriptors": call(302, 1, 7, one, 0),
    "limit with a wide pid": call(302, wide, 0, one, 0),
    "affinity": call(203, 1, 128, mask),
    "parameters": call(142, 1, param),
    "idle scheduler": call(144, 1, 5, param),
    "idle attributes": call(314, 1, attr, 0),
    "nice": call(141, 0, 1, 19),
    "nice of the group": call(141, 1, 1, 19),
    "nice of the user": call(141, 2, 0, 19),
    "idle disk priority": call(251, 1, 1, 3 << 13),
    "disk priority of the group": call(251, 2, 1, 3 << 13),
    "disk priority of the user": call(251, 3, 0, 3 << 13),
    "advice": call(440, pidfd, vector, 1, 21, 0),
    "release": call(448, pidfd, 0),
    "descriptor": call(438, pidfd, 101, 0),
    "comparison": call(312, os.getpid(), 1, 0, 0, 0),
    "trace": call(101, 0x4206, 1, 0, 0),
    "memory": call(311, 1, vector, 1, vector, 1, 0),
    "session": call(109, 0, 1),
}
found = {what: name(result) if result >= 0 else None for what, result in found.items()}
for file in ("oom_score_adj", "oom_adj", "autogroup", "coredump_filter", "clear_refs", "sched",
             "timerslack_ns", "comm", "setgroups", "uid_map", "mem", "task/1/oom_score_adj",
             "task/1/comm", "../1/oom_score_adj", "cwd/proc/1/oom_score_adj"):
    path = f"/proc/1/{file}"
    try:
        with open(path, "wb", buffering=0) as opened:
            opened.write(b"5")
        found[file] = "done"
    except OSError:
        found[file] = None
for number in range(1, 65):
    try:
        os.kill(1, number)
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass
print(json.dumps(found))
"""
_STATE = (
    "cat /proc/1/limits /proc/1/oom_score_adj; chrt -p 1; taskset -p 1; ionice -p 1; ps -o ni= 1"
)
_OWN = """
import os, resource
resource.prlimit(os.getpid(), resource.RLIMIT_CPU, (60, 60))
os.setpriority(os.PRIO_PROCESS, 0, 19); os.setpriority(os.PRIO_PGRP, 0, 19)
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
print(resource.prlimit(0, resource.RLIMIT_CPU), os.getpriority(os.PRIO_PROCESS, 0))
"""


async def test_root_inside_cannot_stall_end_or_change_init(attacker):
    before = await run(attacker, _STATE)
    outcome = await run(attacker, f"/usr/bin/python3 - <<'EOF'\n{_ATTACKS}\nEOF")
    assert outcome.status == 0, outcome
    done = [what for what, result in json.loads(outcome.out).items() if result is not None]
    assert done == []
    assert await health(attacker) == 204
    assert (await run(attacker, _STATE)).out == before.out


async def test_a_process_can_limit_itself(attacker):
    outcome = await run(attacker, f"/usr/bin/python3 - <<'EOF'\n{_OWN}\nEOF")
    assert outcome.out == "(60, 60) 19\n", outcome
