"""The node's queue of heavy work: limits, reports, and what is logged."""

import asyncio
import logging

import pytest

from paddock.adapters.node_metrics import NodeMetrics
from paddock.kit import metrics
from paddock.kit.clock import LoopClock
from paddock.kit.tasks import background
from paddock.runtime.local.node.heavy_work import HeavyKind, HeavyLimits, HeavyWork, team_of
from paddock.runtime.port import AgentConfig

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize(
    ("total", "per_team", "cpus", "limits"),
    [(0, 0, 1, (8, 2)), (0, 0, 2, (8, 2)), (0, 0, 16, (64, 16)), (3, 1, 16, (3, 1))],
)
def test_default_limits_follow_the_cpus(
    total: int, per_team: int, cpus: int, limits: tuple[int, int]
) -> None:
    found = HeavyLimits.of_settings(total, per_team, cpus=cpus)
    assert (found.total, found.per_team) == limits


def test_a_claimed_sandbox_counts_for_the_team_that_has_it() -> None:
    assert team_of(AgentConfig(team="mine"), "default") == "mine"
    assert team_of(AgentConfig(), "default") == "default"


async def _hold(work: HeavyWork, team: str, seconds: float, kind: HeavyKind) -> None:
    async with work.turn(kind, team, f"{team}-1"):
        await asyncio.sleep(seconds)


async def test_waiting_work_is_reported_measured_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = HeavyWork(HeavyLimits(total=8, per_team=1), LoopClock())
    caplog.set_level(logging.INFO)
    tasks = [asyncio.create_task(_hold(work, "slow", 20, HeavyKind.FORK)) for _ in range(3)]
    await asyncio.sleep(1)
    report = {one.kind: one for one in work.report()}
    assert (report["fork"].running, report["fork"].waiting) == (1, 2)
    assert (report["restore"].running, report["restore"].waiting) == (0, 0)
    await _hold(work, "other", 0.1, HeavyKind.RESTORE)
    await asyncio.gather(*tasks)
    report = {one.kind: one for one in work.report()}
    assert report["restore"].waits[0] == 1
    # At once, after 20 s and after 40 s.
    assert report["fork"].waits == (1, 0, 0, 0, 0, 0, 2, 0, 0)
    assert report["fork"].waited_seconds == pytest.approx(60)
    # Once for the team, however many wait.
    waits = [one for one in caplog.records if one.message == "heavy work waits for its turn"]
    assert len(waits) == 1
    work.close()


async def test_only_work_that_waits_is_withdrawn() -> None:
    work = HeavyWork(HeavyLimits(total=1, per_team=1), LoopClock())
    running, waiting = (
        asyncio.create_task(_hold(work, "team", 5, HeavyKind.DUMP)) for _ in range(2)
    )
    await asyncio.sleep(1)
    assert not work.withdraw(running)
    assert work.withdraw(waiting)
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert {one.kind: one.waiting for one in work.report()}["dump"] == 0
    await running
    work.close()


async def test_the_control_plane_serves_the_metrics_of_the_node() -> None:
    work = HeavyWork(HeavyLimits(total=1, per_team=1), LoopClock())

    class Source:
        async def heavy_work(self):
            return work.report()

    tasks = [asyncio.create_task(_hold(work, "team", 30, HeavyKind.DUMP)) for _ in range(3)]
    async with background(NodeMetrics().run(Source()), name="metrics"):
        await asyncio.sleep(6)
        text = metrics.exposition().decode()
        assert 'paddock_heavy_work_waiting{kind="dump"} 2.0' in text
        assert 'paddock_heavy_work_running{kind="dump"} 1.0' in text
        assert 'paddock_heavy_work_wait_seconds_bucket{kind="dump",le="0.01"} 1.0' in text
        assert 'paddock_heavy_work_wait_seconds_count{kind="dump"} 1.0' in text
    assert "paddock_heavy_work" not in metrics.exposition().decode()
    await asyncio.gather(*tasks)
    work.close()
