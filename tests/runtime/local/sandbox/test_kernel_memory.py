"""When the kernel memory of a sandbox is inspected, and what is read then."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paddock.runtime.local.kernel import uncharged
from paddock.runtime.local.sandbox.kernel_memory import KernelMemoryWatch
from paddock.runtime.port import Limits


class Cgroup:
    """A cgroup of one process, with a counter of CPU time."""

    def __init__(self) -> None:
        self.seconds = 1.0
        self.inspections = 0
        self.kills: list[str] = []

    def cpu_seconds(self, name: str) -> float:
        return self.seconds

    def processes(self, name: str) -> list[int]:
        self.inspections += 1
        return [7, 8]

    def kill(self, name: str) -> None:
        self.kills.append(name)


def a_sandbox() -> Any:
    record = SimpleNamespace(init=SimpleNamespace(pid=7))
    limits = Limits(memory_bytes=256 << 20)
    return SimpleNamespace(uid="a", cgroup="s1", record=record, limits=limits, kill_reason=None)


def write_process(proc: Path, *, signals: int) -> None:
    (proc / "7" / "fd").mkdir(parents=True, exist_ok=True)
    status = f"Uid:\t5\t5\t5\t5\nSigQ:\t{signals}/9\nSeccomp_filters:\t1\n"
    (proc / "7" / "status").write_text(status)


def a_watch(cgroup: Any, proc: Path, run_in_thread: Any = asyncio.to_thread) -> KernelMemoryWatch:
    return KernelMemoryWatch(cgroup, run_in_thread, proc)


async def test_a_sandbox_is_inspected_once_until_it_runs_again(tmp_path: Path):
    cgroup, sandbox = Cgroup(), a_sandbox()
    watch = a_watch(cgroup, tmp_path)

    for seconds, expected in ((1.0, 1), (1.0, 1), (1.5, 2), (1.5, 2), (0.1, 3)):
        cgroup.seconds = seconds  # the last one is restored, in a new cgroup
        await watch.check_all([sandbox])
        assert cgroup.inspections == expected


def test_a_process_that_exits_during_the_inspection_is_left_out(tmp_path: Path):
    write_process(tmp_path, signals=3)
    watch = a_watch(Cgroup(), tmp_path)

    used = watch.inspect("s1", 7, watch.locks())

    assert used.pending_signals == 3
    assert used.netlink == used.locks == 0


async def test_a_sandbox_beyond_its_bound_is_killed_with_the_reason(tmp_path: Path):
    cgroup, sandbox = Cgroup(), a_sandbox()
    write_process(tmp_path, signals=uncharged.MAX_PENDING_SIGNALS + 1)

    await a_watch(cgroup, tmp_path).check_all([sandbox])

    assert cgroup.kills == ["s1"]
    assert "pending signals" in sandbox.kill_reason


async def test_a_sandbox_that_was_replaced_meanwhile_is_not_killed(tmp_path: Path):
    cgroup, sandbox = Cgroup(), a_sandbox()
    write_process(tmp_path, signals=uncharged.MAX_PENDING_SIGNALS + 1)

    async def replaced_meanwhile(call: Any, *arguments: Any) -> Any:
        if arguments:  # the inspection, not the list of locks
            sandbox.record = SimpleNamespace(init=SimpleNamespace(pid=99))
        return call(*arguments)

    await a_watch(cgroup, tmp_path, replaced_meanwhile).check_all([sandbox])

    assert cgroup.kills == []
