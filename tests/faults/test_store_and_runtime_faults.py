"""A mixed storm while store and runtime fail, control planes are killed and clocks jump.

All on virtual time and from one seed: a failure names the seed that replays it, step by step
(`pytest tests/faults -k seed_7`, or `python -m tests.faults.replay storm 7` for its trace).
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import NotFoundError, QuotaExceededError
from paddock.runtime.port import InstanceState
from tests.faults import scenarios
from tests.faults.virtual import Trace, replayable
from tests.faults.worlds import faulty_world
from tests.scenario.paddock import CALLER

pytestmark = pytest.mark.timeout(120)


def seeds(count: int) -> list:
    return [pytest.param(seed, id=f"seed_{seed}") for seed in range(count)]


def test_random_faults_and_kills_lose_duplicate_and_leak_nothing(
    storm_seed: int,
) -> None:
    replayable(storm_seed, scenarios.storm)


@pytest.mark.parametrize("seed", seeds(6))
def test_deadlines_hold_when_the_wall_clock_jumps(seed: int) -> None:
    replayable(seed, scenarios.jumps)


@pytest.mark.parametrize("seed", seeds(10))
def test_a_change_of_leader_does_nothing_twice(seed: int) -> None:
    replayable(seed, scenarios.leaders)


@pytest.mark.parametrize("seed", seeds(8))
def test_a_leader_stopped_beyond_its_lease_does_no_harm_when_resumed(seed: int) -> None:
    replayable(seed, scenarios.stops)


@pytest.mark.parametrize("seed", seeds(5))
def test_control_planes_claiming_the_same_stock_share_no_sandbox(seed: int) -> None:
    replayable(seed, scenarios.rush)


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_a_seed_replays_the_same_run_in_another_process(scenario: str) -> None:
    # Another process has other addresses and string hashes: nothing may depend on them.
    said = set[str]()
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.replay", scenario, "3"],
            env=os.environ | {"PYTHONHASHSEED": hashes},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        said.add(done.stdout.partition(" in ")[0])
    assert len(said) == 1, said


def test_a_failed_sandbox_can_be_killed_and_frees_its_quota() -> None:
    async def scenario(seed: int, trace: Trace) -> None:
        async with faulty_world(seed, trace) as world:
            manager = world.planes[0].manager
            one = Quota((QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 1),))
            await world.planes[0].control.keyring.set_team_quota("default", one)
            made = await manager.claims.create(
                CALLER, NewSandbox(template="base", timeout_seconds=None)
            )
            assert made.spec.claim is not None
            world.runtime.crash(made.metadata.uid)
            await asyncio.sleep(5)
            with pytest.raises(QuotaExceededError):
                await manager.claims.create(CALLER, NewSandbox(template="base"))

            await manager.lifecycle.kill(CALLER, made.spec.claim.sandbox_id)

            with pytest.raises(NotFoundError):
                await manager.lifecycle.kill(CALLER, made.spec.claim.sandbox_id)
            await manager.claims.create(CALLER, NewSandbox(template="base"))
            await asyncio.sleep(5)

    replayable(0, scenario)


def test_a_deadline_skipped_by_a_clock_jump_is_applied_within_seconds() -> None:
    async def scenario(seed: int, trace: Trace) -> None:
        async with faulty_world(seed, trace) as world:
            manager = world.planes[0].manager
            ends = await manager.claims.create(
                CALLER, NewSandbox(template="base", timeout_seconds=900)
            )
            rests = await manager.claims.create(
                CALLER, NewSandbox(template="base", timeout_seconds=900, auto_pause=True)
            )
            await asyncio.sleep(1)
            world.clock.jump(1000)
            await asyncio.sleep(10)
            assert await world.runtime.inspect(ends.metadata.uid) is None
            instance = await world.runtime.inspect(rests.metadata.uid)
            assert instance is not None
            assert instance.state is InstanceState.FROZEN

    replayable(0, scenario)
