"""The battery: every attack in sandboxes of both privileges and in every state.

By default each attack on kernel memory that ends its sandbox runs in one kind of sandbox, and all
other attacks in all of them. `--battery` runs every attack in all. With `--battery-results FILE`
the results are appended to a file, from which `python -m tools.battery_table` writes the table of
SECURITY.md.
"""

import pytest

from paddock.runtime.local.kernel import uncharged
from paddock.runtime.port import Limits
from tests.runtime.local.inside import begin, run
from tests.runtime.local.isolation.test_escape_floods import group_of
from tests.runtime.local.nodes import TestNode, eventually
from tests.security.battery.attacks import (
    ATTACKS,
    BOUNDED,
    KINDS,
    PRIVILEGES,
    STATES,
    Attack,
)
from tests.security.battery.machine import KernelMemoryMeter
from tests.security.battery.results import Recorder, Result
from tests.security.battery.states import prepare

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

MEMORY = 256 << 20
ALLOWED = uncharged.allowance(MEMORY)
SECONDS = 10.0
"""After so long, an attack on kernel memory costs no more than what is allowed."""
CELLS = [(privileges, state) for privileges in PRIVILEGES for state in STATES]


@pytest.fixture
def recorder(request: pytest.FixtureRequest) -> Recorder:
    return Recorder(request.config.getoption("--battery-results"))


@pytest.mark.parametrize("kind", KINDS)
async def test_no_attack_succeeds(attacker, age, privileges, kind, recorder):
    succeeded: list[str] = []
    for attack in ATTACKS:
        if attack.kind == kind:
            outcome = await run(attacker, attack.script)
            is_held = attack.is_held(outcome)
            recorder.record(Result(kind, attack.name, privileges, age, is_held))
            if not is_held:
                succeeded.append(f"{attack.name}: {outcome}")
    assert succeeded == []
    assert (await run(attacker, "echo alive")).out == "alive\n"


def bounded_cells() -> list[tuple[Attack, str, str, bool]]:
    """Return each attack on kernel memory in each cell, and whether it is in the default run."""
    return [
        (attack, *cell, at == number % len(CELLS))
        for number, attack in enumerate(BOUNDED)
        for at, cell in enumerate(CELLS)
    ]


@pytest.mark.parametrize(
    ("attack", "privileges", "state", "is_default"),
    [
        pytest.param(*cell, id=f"{cell[0].name}-{cell[1]}-{cell[2]}".replace(" ", "_"))
        for cell in bounded_cells()
    ],
)
async def test_kernel_memory_beyond_the_limit_is_bounded_and_ends_the_sandbox(
    node: TestNode, box, request, recorder, attack, privileges, state, is_default
):
    if not (is_default or request.config.getoption("--battery")):
        pytest.skip("needs --battery")
    uid, neighbour = f"bounded-{privileges}-{state}", await box()
    try:
        limits = Limits(memory_bytes=MEMORY)
        instance = await prepare(node, uid, privileges, state, limits)
        groups, group = await group_of(node, uid)
        init = (await node.facts())["inits"][uid]
        meter = KernelMemoryMeter(groups, group, init)
        await begin(instance, f"{attack.script} > /tmp/output 2>&1")
        cost = await meter.watch(SECONDS)
        reason = await eventually(lambda: _failed(node, uid), seconds=60)
    finally:
        await node.runtime.destroy(uid)
    # What stays after the sandbox is gone belongs to others.
    at_end = cost.at_end - await meter.of_others()
    is_held = at_end <= ALLOWED and attack.expected in reason
    recorder.record(Result(attack.kind, attack.name, privileges, state, is_held, cost.peak))
    assert at_end <= ALLOWED, f"{at_end >> 20} MiB; peak {cost.peak >> 20} MiB"
    assert attack.expected in reason
    assert (await run(neighbour, "echo fine")).out == "fine\n"


async def _failed(node: TestNode, uid: str) -> str | None:
    found = await node.runtime.inspect(uid)
    assert found is not None
    return found.reason if found.state == "failed" else None
