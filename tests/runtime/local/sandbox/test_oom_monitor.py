"""Reports of OOM kills: once at first, then at most once per minute; the cause of an exit."""

import asyncio
from types import SimpleNamespace

import pytest

from paddock.kit.clock import LoopClock
from paddock.runtime.local.sandbox.oom_monitor import REPORT_SECONDS, OomMonitor
from paddock.runtime.port import InstanceState, RuntimeEvent

pytestmark = pytest.mark.looptime


class Counter:
    """The cgroups of one sandbox, with a count of kills set by the test."""

    is_usable = True
    kills = 0

    def oom_kills(self, name: str) -> int:
        return self.kills

    def oom_cause(self, name: str) -> str:
        return "the sandbox used its 1 GiB of memory"


class Box:
    """What the monitor uses of a sandbox."""

    uid = "u"
    cgroup = "s1"

    def __init__(self) -> None:
        self.record = SimpleNamespace(oom_kills=0, state=InstanceState.RUNNING)
        self.logged: list[str] = []
        self.log_file = SimpleNamespace(write=lambda text, **_: self.logged.append(text))

    def save(self, *, oom_kills: int) -> None:
        self.record.oom_kills = oom_kills


def monitored() -> tuple[OomMonitor, Counter, Box, list[RuntimeEvent]]:
    counter, events = Counter(), []
    monitor = OomMonitor(counter, LoopClock(), events.append)  # type: ignore[arg-type]
    return monitor, counter, Box(), events


async def test_a_sandbox_that_is_killed_in_a_loop_is_reported_once_per_minute() -> None:
    monitor, counter, box, events = monitored()
    for _ in range(100):
        counter.kills += 1
        monitor.check(box)  # type: ignore[arg-type]
        await asyncio.sleep(2)
    assert [event.memory_kills for event in events] == [1, 30, 30, 30]
    assert {event.reason for event in events} == {
        "processes were killed: the sandbox used its 1 GiB of memory"
    }
    assert box.logged == ["killed: the sandbox used its 1 GiB of memory"] * 4
    await asyncio.sleep(REPORT_SECONDS)
    monitor.check(box)  # type: ignore[arg-type]
    assert sum(event.memory_kills for event in events) == 100


async def test_an_exit_is_explained_by_a_kill_just_before_it() -> None:
    monitor, counter, box, _ = monitored()
    assert monitor.exit_cause(box) is None  # type: ignore[arg-type]
    counter.kills = 1
    assert monitor.exit_cause(box) == "the sandbox used its 1 GiB of memory"  # type: ignore[arg-type]
    monitor.check(box)  # type: ignore[arg-type]
    assert monitor.exit_cause(box) == "the sandbox used its 1 GiB of memory"  # type: ignore[arg-type]
    await asyncio.sleep(60)
    assert monitor.exit_cause(box) is None  # type: ignore[arg-type]
