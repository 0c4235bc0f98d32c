"""Attacks on init, whose end is the end of the sandbox and which starts all commands."""

import pytest

from tests.runtime.local.inside import health, run
from tests.security.battery.attacks import ATTACKS, INIT

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

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
    for attack in ATTACKS:
        if attack.kind == INIT:
            assert attack.is_held(await run(attacker, attack.script)), attack.name
    assert await health(attacker) == 204
    assert (await run(attacker, _STATE)).out == before.out


async def test_a_process_can_limit_itself(attacker):
    outcome = await run(attacker, f"/usr/bin/python3 - <<'EOF'\n{_OWN}\nEOF")
    assert outcome.out == "(60, 60) 19\n", outcome
