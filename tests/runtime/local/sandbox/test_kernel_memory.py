"""When the kernel memory of a sandbox is inspected, and what is read then."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddock.kit.tasks import background
from paddock.runtime.local.kernel import syscalls, uncharged
from paddock.runtime.local.kernel.kernel_growth import KernelGrowth
from paddock.runtime.local.kernel.uncharged import KernelMemoryBounds
from paddock.runtime.local.sandbox.kernel_memory import KernelMemoryWatch
from paddock.runtime.port import Limits

MAX_PENDING_SIGNALS = KernelMemoryBounds().pending_signals


class Cgroup:
    """A cgroup of one process, with a counter of CPU time."""

    def __init__(self) -> None:
        self.bounds = KernelMemoryBounds()
        self.seconds = 1.0
        self.inspections = 0
        self.charged = 0
        self.pids = [7, 8]
        self.kills: list[str] = []

    def cpu_seconds(self, name: str) -> float:
        return self.seconds

    def processes(self, name: str) -> list[int]:
        self.inspections += 1
        return self.pids

    def socket_bytes(self, name: str) -> int:
        return self.charged

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


def write_threads(proc: Path, tids: range, *, filters: int) -> None:
    status = f"Uid:\t5\t5\t5\t5\nSigQ:\t0/9\nThreads:\t{len(tids)}\nSeccomp_filters:\t1\n"
    (proc / "7" / "fd").mkdir(parents=True)
    (proc / "7" / "status").write_text(status)
    for tid in tids:
        task = proc / "7" / "task" / str(tid)
        (task / "fd").mkdir(parents=True)
        (task / "status").write_text(f"Name:\tx\nSeccomp_filters:\t{filters}\n")


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
    write_process(tmp_path, signals=MAX_PENDING_SIGNALS + 1)

    await a_watch(cgroup, tmp_path).check_all([sandbox])

    assert cgroup.kills == ["s1"]
    assert "pending signals" in sandbox.kill_reason


async def test_a_sandbox_that_was_replaced_meanwhile_is_not_killed(tmp_path: Path):
    cgroup, sandbox = Cgroup(), a_sandbox()
    write_process(tmp_path, signals=MAX_PENDING_SIGNALS + 1)

    async def replaced_before(call: Any, *arguments: Any) -> Any:
        if arguments:  # the inspection, not the list of locks
            sandbox.record = SimpleNamespace(init=SimpleNamespace(pid=99))
        return call(*arguments)

    await a_watch(cgroup, tmp_path, replaced_before).check_all([sandbox])

    assert cgroup.inspections == 0
    assert cgroup.kills == []


async def test_a_sandbox_that_is_replaced_while_it_is_inspected_is_not_killed(tmp_path: Path):
    cgroup, sandbox = Cgroup(), a_sandbox()
    write_process(tmp_path, signals=MAX_PENDING_SIGNALS + 1)

    async def replaced_after(call: Any, *arguments: Any) -> Any:
        result = call(*arguments)
        if arguments:
            sandbox.record = SimpleNamespace(init=SimpleNamespace(pid=99))
        return result

    await a_watch(cgroup, tmp_path, replaced_after).check_all([sandbox])

    assert cgroup.inspections == 1
    assert cgroup.kills == []


async def test_each_of_many_sandboxes_beyond_their_bound_is_killed_before_the_next_is_inspected(
    tmp_path: Path,
):
    happened: list[tuple[str, str]] = []

    class Recorded(Cgroup):
        def processes(self, name: str) -> list[int]:
            happened.append(("inspected", name))
            # Every tenth has the process that has too many signals.
            return [7, 8] if int(name) % 10 == 0 else [8, 9]

        def kill(self, name: str) -> None:
            happened.append(("killed", name))

    write_process(tmp_path, signals=MAX_PENDING_SIGNALS + 1)
    sandboxes = [a_sandbox() for _ in range(40)]
    for number, sandbox in enumerate(sandboxes):
        sandbox.uid = sandbox.cgroup = str(number)

    await a_watch(Recorded(), tmp_path).check_all(sandboxes)

    expected: list[tuple[str, str]] = []
    for number in range(40):
        expected.append(("inspected", str(number)))
        if number % 10 == 0:
            expected.append(("killed", str(number)))
    assert happened == expected


@pytest.mark.parametrize(("pids", "counts_sockets"), [([7], False), ([7, 8], True), ([8], True)])
def test_sockets_are_read_only_if_a_process_besides_init_can_have_them(
    tmp_path: Path, monkeypatch, pids: list[int], counts_sockets: bool
):
    monkeypatch.setattr("paddock.runtime.local.sandbox.kernel_memory._descriptors", lambda _: 10)
    cgroup = Cgroup()
    cgroup.pids = pids
    write_process(tmp_path, signals=3)
    net = tmp_path / "7" / "net"
    net.mkdir()
    (net / "netlink").write_text("head\n1 0 0 0 4096 0 0 2 0 9\n")
    (net / "sockstat").write_text("TCP: inuse 5000 orphan 9 tw 7 alloc 9 mem 1\n")
    watch = a_watch(cgroup, tmp_path)

    used = watch.inspect("s1", 7, watch.locks())

    assert used.netlink == (4096 if counts_sockets else 0)
    # Connections outlive their process: they count in any case.
    assert used.tcp >= 4000 * uncharged.CONNECTION_BYTES


@pytest.mark.parametrize(("number", "expected"), [(17, 0), (18, 17 * 2)])
def test_filters_of_threads_are_read_only_if_there_are_many(
    tmp_path: Path, monkeypatch, number: int, expected: int
):
    monkeypatch.setattr(syscalls, "same_descriptors", lambda one, other: True)
    write_threads(tmp_path, range(7, 7 + number), filters=3)
    watch = a_watch(Cgroup(), tmp_path)

    used = watch.inspect("s1", 7, watch.locks())

    assert used.filters == expected * uncharged.FILTER_BYTES


def test_descriptors_are_counted_once_per_table(tmp_path: Path, monkeypatch):
    table_of = {7: 1, 8: 1, 9: 2, 10: 2}
    monkeypatch.setattr(
        syscalls, "same_descriptors", lambda one, other: table_of[one] == table_of[other]
    )
    monkeypatch.setattr("paddock.runtime.local.sandbox.kernel_memory._descriptors", lambda _: 10)
    write_threads(tmp_path, range(7, 11), filters=1)
    watch = a_watch(Cgroup(), tmp_path)

    used = watch.inspect("s1", 7, watch.locks(), thorough=True)

    assert used.descriptors == 20 * uncharged.DESCRIPTOR_BYTES


async def test_a_table_of_descriptors_is_found_in_the_turn_of_its_thread(
    tmp_path: Path, monkeypatch
):
    calls: list[int] = []

    def same(one: int, other: int) -> bool:
        calls.append(other)
        return 30 not in (one, other)

    monkeypatch.setattr(syscalls, "same_descriptors", same)
    monkeypatch.setattr(
        "paddock.runtime.local.sandbox.kernel_memory._descriptors",
        lambda path: 100_000 if path.parent.name == "30" else 10,
    )
    write_threads(tmp_path, range(7, 48), filters=1)
    cgroup, sandbox = Cgroup(), a_sandbox()
    watch = a_watch(cgroup, tmp_path)

    for tick in range(4):
        cgroup.seconds += tick + 1
        if not cgroup.kills:
            calls.clear()
            await watch.check_all([sandbox])
            if not cgroup.kills:
                assert len(calls) == 10  # a quarter of the 40 other threads

    assert cgroup.kills == ["s1"]
    assert "open descriptors" in sandbox.kill_reason


async def test_busy_sandboxes_are_inspected_first(tmp_path: Path):
    order: list[str] = []
    seconds = {"s1": 1.0, "s2": 1.0, "s3": 1.0}

    class Busy(Cgroup):
        def cpu_seconds(self, name: str) -> float:
            return seconds[name]

        def processes(self, name: str) -> list[int]:
            order.append(name)
            return []

    sandboxes = [a_sandbox() for _ in seconds]
    for sandbox, name in zip(sandboxes, seconds, strict=True):
        sandbox.uid = sandbox.cgroup = name
    watch = a_watch(Busy(), tmp_path)
    await watch.check_all(sandboxes)
    order.clear()
    seconds |= {"s1": 1.1, "s2": 9.0, "s3": 1.5}

    await watch.check_all(sandboxes)

    assert order == ["s2", "s3", "s1"]


def write_meminfo(proc: Path, *, slab_mib: int, free_mib: int = 1000) -> None:
    fields = {"MemTotal": 2000, "MemFree": free_mib, "SUnreclaim": slab_mib}
    lines = [f"{name}: {value << 10} kB" for name, value in fields.items()]
    (proc / "meminfo").write_text("\n".join(lines))


@pytest.mark.looptime
async def test_sandboxes_are_inspected_every_two_seconds_and_at_once_when_the_kernel_grows(
    tmp_path: Path,
):
    write_meminfo(tmp_path, slab_mib=100)
    cgroup, sandbox = Cgroup(), a_sandbox()

    async def run_here(call: Any, *arguments: Any) -> Any:
        return call(*arguments)

    def up() -> list[Any]:
        cgroup.seconds += 1  # it runs all the time
        return [sandbox]

    async with background(a_watch(cgroup, tmp_path, run_here).run(up), name="watch"):
        await asyncio.sleep(1.95)
        first = cgroup.inspections
        await asyncio.sleep(4)
        assert cgroup.inspections == first + 2
        write_meminfo(tmp_path, slab_mib=120)
        await asyncio.sleep(0.25)
        assert cgroup.inspections == first + 3
        await asyncio.sleep(0.5)
        assert cgroup.inspections == first + 3


@pytest.mark.parametrize(
    ("slab", "free", "expected"),
    [(7, 0, False), (8, 0, True), (0, 63, False), (0, 64, True), (-50, 0, False)],
)
def test_growth_is_measured_from_the_least_since_the_last_one(
    tmp_path: Path, slab: int, free: int, expected: bool
):
    write_meminfo(tmp_path, slab_mib=200)
    growth = KernelGrowth(tmp_path)
    write_meminfo(tmp_path, slab_mib=100, free_mib=1100)
    assert not growth.has_grown()
    write_meminfo(tmp_path, slab_mib=100 + slab, free_mib=1100 - slab - free)

    assert growth.has_grown() is expected
    assert not growth.has_grown()


@pytest.mark.parametrize(("charged", "errors"), [(0, 1000), (400, 600), (5000, 0)])
def test_unread_data_that_is_charged_is_no_error_of_a_socket(
    tmp_path: Path, charged: int, errors: int
):
    cgroup = Cgroup()
    cgroup.charged = charged
    (tmp_path / "7" / "net").mkdir(parents=True)
    row = f"1: 0:1 0:0 07 00000005:{1000:08x} 00:0 0 0 0 4711 2 0 0"
    (tmp_path / "7" / "net" / "udp").write_text(f"head\n{row}\n")
    watch = a_watch(cgroup, tmp_path)

    assert watch.inspect("s1", 7, watch.locks()).udp == 5 + errors


@pytest.mark.parametrize(
    ("number", "descriptors", "expected"),
    [
        (4096, 0, 0),
        (4097, 0, 4097 * uncharged.CONNECTION_BYTES),
        (4097, 1000, 3097 * uncharged.CONNECTION_BYTES),
        (4097, 3000, 1 * uncharged.CONNECTION_BYTES),  # as the table tells
        (60_000, 3000, 57_000 * uncharged.CONNECTION_BYTES),
    ],
)
def test_the_table_of_connections_is_read_only_if_their_number_is_not_clear(
    tmp_path: Path, monkeypatch, number: int, descriptors: int, expected: int
):
    monkeypatch.setattr(
        "paddock.runtime.local.sandbox.kernel_memory._descriptors", lambda _: descriptors
    )
    write_process(tmp_path, signals=0)
    net = tmp_path / "7" / "net"
    net.mkdir(parents=True)
    (net / "tcp").write_text("head\n1: 0:1 0:2 08 0:0 00:0 0 0 0 0 1 0\n")
    (net / "sockstat").write_text(f"TCP: inuse {number} orphan 0 tw 0 alloc 9 mem 1\n")
    watch = a_watch(Cgroup(), tmp_path)

    assert watch.inspect("s1", 7, watch.locks()).tcp == expected


async def test_filters_of_one_thread_are_found_in_its_turn(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(syscalls, "same_descriptors", lambda one, other: True)
    write_threads(tmp_path, range(7, 57), filters=1)
    status = tmp_path / "7" / "task" / "30" / "status"
    status.write_text("Name:\tx\nSeccomp_filters:\t9000\n")
    (tmp_path / "vmallocinfo").write_text(f"0x1-0x2 {64 << 20} bpf_prog_pack_alloc+0x1\n")
    cgroup, sandbox = Cgroup(), a_sandbox()
    watch = a_watch(cgroup, tmp_path)

    for tick in range(4):
        cgroup.seconds += tick + 1
        await watch.check_all([sandbox])

    assert cgroup.kills == ["s1"]
    assert "seccomp filters" in sandbox.kill_reason


def a_sandbox_of(number: int) -> Any:
    record = SimpleNamespace(init=SimpleNamespace(pid=number))
    limits = Limits(memory_bytes=64 << 30)
    return SimpleNamespace(
        uid=f"u{number}", cgroup=str(number), record=record, limits=limits, kill_reason=None
    )


class Filtered(Cgroup):
    """Cgroups of two processes each, named by the first one."""

    def processes(self, name: str) -> list[int]:
        return [int(name), int(name) + 1]


def write_filters(proc: Path, pid: int, filters: int) -> None:
    (proc / str(pid) / "fd").mkdir(parents=True, exist_ok=True)
    status = f"Uid:\t5\t5\t5\t5\nSigQ:\t0/9\nSeccomp_filters:\t{1 + filters}\n"
    (proc / str(pid) / "status").write_text(status)


def write_pool(proc: Path, *, limit: int, compiled: int) -> None:
    (proc / "sys" / "net" / "core").mkdir(parents=True, exist_ok=True)
    (proc / "sys" / "net" / "core" / "bpf_jit_limit").write_text(f"{limit}\n")
    (proc / "vmallocinfo").write_text(f"0x0-0x1 {compiled} bpf_prog_pack_alloc+0x9 pages=1\n")


async def test_of_sandboxes_that_fill_the_pool_of_filters_the_one_with_most_is_killed(
    tmp_path: Path,
):
    cgroup, sandboxes = Filtered(), [a_sandbox_of(number) for number in (10, 20, 30, 40)]
    for sandbox, filters in zip(sandboxes, (200, 400, 300, 1), strict=True):
        write_filters(tmp_path, int(sandbox.cgroup), filters)
    write_pool(tmp_path, limit=100 << 20, compiled=80 << 20)
    watch = a_watch(cgroup, tmp_path)

    await watch.check_all(sandboxes)
    assert cgroup.kills == ["20"]
    assert "of all sandboxes" in sandboxes[1].kill_reason

    # The others are below the half without it.
    del sandboxes[1]
    write_pool(tmp_path, limit=100 << 20, compiled=41 << 20)
    await watch.check_all(sandboxes)
    assert cgroup.kills == ["20"]


async def test_filters_that_many_processes_have_inherited_kill_no_sandbox(tmp_path: Path):
    cgroup, sandboxes = Filtered(), [a_sandbox_of(number) for number in (10, 20, 30)]
    for sandbox in sandboxes:
        write_filters(tmp_path, int(sandbox.cgroup), 100_000)
    write_pool(tmp_path, limit=100 << 20, compiled=6 << 20)

    await a_watch(cgroup, tmp_path).check_all(sandboxes)

    assert cgroup.kills == []


async def test_the_operator_sets_the_bounds(tmp_path: Path):
    cgroup, sandbox = Cgroup(), a_sandbox()
    write_process(tmp_path, signals=MAX_PENDING_SIGNALS + 1)

    cgroup.bounds = KernelMemoryBounds(pending_signals=MAX_PENDING_SIGNALS + 1)
    await a_watch(cgroup, tmp_path).check_all([sandbox])
    assert cgroup.kills == []

    cgroup.bounds = KernelMemoryBounds(pending_signals=1024)
    await a_watch(cgroup, tmp_path).check_all([sandbox])
    assert cgroup.kills == ["s1"]
