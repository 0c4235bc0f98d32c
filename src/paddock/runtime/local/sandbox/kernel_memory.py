"""Kills sandboxes that take kernel memory which no limit counts.

`inspect` reads from /proc what the processes of one sandbox hold; `kernel/uncharged.py` judges it.
A sandbox that has used no CPU time since it was last inspected holds what it held then, so an idle
one costs the read of a counter. All are inspected every two seconds, and at once when the kernel
memory of the machine grows (`kernel/kernel_growth.py`), those first that have run most. If only
init is left in a sandbox, no process can hold anything, and less is read. Seccomp filters of all
sandboxes come from one pool of the machine: if they take half of it, the sandbox with most is
killed.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from paddock.kit.logs import fields
from paddock.runtime.local.kernel import syscalls, uncharged
from paddock.runtime.local.kernel.cgroups import Cgroups
from paddock.runtime.local.kernel.kernel_growth import KernelGrowth
from paddock.runtime.local.kernel.uncharged import LockTable, ProcessFacts, UnchargedMemory
from paddock.runtime.local.node.records import RecordedProcess
from paddock.runtime.local.sandbox.sandbox import NodeSandbox

log = logging.getLogger(__name__)

RunInThread = Callable[..., Awaitable[Any]]
Init = RecordedProcess | None
_LEAST_CPU_SECONDS = 0.001
_FEW_CONNECTIONS = 4096
"""Up to this number, the table of TCP connections is not read: it takes long."""
_FEW_THREADS = 16
"""Up to this number, filters of threads are not read: those of one take up to 0.8 MiB."""
_TURNS = 4
"""Each regular inspection first reads one of so many threads."""
_LOOK_SECONDS = 0.1
"""How often the kernel memory of the machine is read."""
_INSPECT_SECONDS = 2.0
_REST = 3
"""After inspections that growth caused, the watch rests for so many times as long …"""
_MOST_REST_SECONDS = 0.5
"""… but no longer: an attack takes hundreds of MiB per second."""
_ERROR_SHARE = 8
"""The number of connections may be wrong by this part of the allowance."""
_BATCH = 16
"""Sandboxes that are inspected by one call of a thread: each call costs 0.1 ms."""
_MAX_TABLES = 16
"""Threads with more tables of descriptors than this are not compared with each other."""


class KernelMemoryWatch:
    """Finds and kills the sandboxes of a node that hold too much."""

    def __init__(
        self, cgroups: Cgroups, run_in_thread: RunInThread, proc: Path = Path("/proc")
    ) -> None:
        self._cgroups = cgroups
        self._run_in_thread = run_in_thread
        self._proc = proc
        self._inspected_at: dict[str, float] = {}
        """The CPU time of each sandbox when it was last inspected, by uid."""
        self._filters: dict[str, int] = {}
        """The size of each sandbox's filters when it was last inspected, by uid."""
        self._turn = 0

    async def run(self, sandboxes: Callable[[], Sequence[NodeSandbox]]) -> None:
        """Check the sandboxes until cancelled."""
        growth, last = KernelGrowth(self._proc), 0.0
        pause, now = _LOOK_SECONDS, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(pause)
            pause, began = _LOOK_SECONDS, now()
            has_grown = growth.has_grown()
            if not has_grown and began - last < _INSPECT_SECONDS:
                continue
            try:
                await self.check_all(sandboxes(), thorough=has_grown)
            except Exception:
                log.exception("kernel memory of sandboxes could not be checked")
            last = now()
            pause = max(pause, min((last - began) * _REST, _MOST_REST_SECONDS))

    async def check_all(self, sandboxes: Sequence[NodeSandbox], *, thorough: bool = False) -> None:
        """Kill those of all sandboxes with processes that hold more than their limit allows.

        If `thorough`, every thread is read, not only those whose turn it is.
        """
        self._turn += 1
        due = await self._due(sandboxes)
        if not due:
            return
        locks = await self._run_in_thread(self.locks)
        rest: list[tuple[NodeSandbox, Init]] = [(one, one.record.init) for one in due]
        while rest:
            found: tuple[int, str | None] = await self._run_in_thread(
                self._inspect_some, rest[:_BATCH], locks, thorough
            )
            done, reason = found
            sandbox, init = rest[done - 1]
            # Its cgroup may belong to another sandbox by now.
            if reason is not None and sandbox.record.init == init:
                self._kill(sandbox, reason)
            rest = rest[done:]
        await self._check_pool(sandboxes)

    def _kill(self, sandbox: NodeSandbox, reason: str) -> None:
        log.warning(
            "sandbox killed for kernel memory", extra=fields(sandbox=sandbox.uid, reason=reason)
        )
        sandbox.kill_reason = reason
        self._filters.pop(sandbox.uid, None)
        self._cgroups.kill(sandbox.cgroup)

    async def _check_pool(self, sandboxes: Sequence[NodeSandbox]) -> None:
        """Kill the sandbox with most filters if all together take too much of their pool.

        One in each check: its filters are gone from the pool only after a moment.
        """
        filters = sum(self._filters.values())
        if filters <= uncharged.MAX_FILTER_BYTES:
            return
        reason: str | None = await self._run_in_thread(self._excess_of_pool, filters)
        by_uid = {one.uid: one for one in sandboxes if one.record.init is not None}
        most = max(self._filters.keys() & by_uid.keys(), key=self._filters.__getitem__, default="")
        if reason is not None and most:
            self._kill(by_uid[most], reason)

    def _excess_of_pool(self, filters: int) -> str | None:
        pool = _read(self._proc / "sys/net/core/bpf_jit_limit")
        if not pool or uncharged.excess_of_all(filters, int(pool)) is None:
            return None
        compiled = self._all_compiled_filters()
        return uncharged.excess_of_all(min(filters, compiled or filters), int(pool))

    def _inspect_some(
        self, sandboxes: Sequence[tuple[NodeSandbox, Init]], locks: LockTable, thorough: bool
    ) -> tuple[int, str | None]:
        """Inspect until one must end; return how many were inspected, and why the last must end."""
        for number, (sandbox, init) in enumerate(sandboxes, start=1):
            if init is None or sandbox.record.init != init:
                continue
            limit = sandbox.limits.memory_bytes or _machine_memory()
            used = self.inspect(sandbox.cgroup, init.pid, locks, limit, thorough)
            self._filters[sandbox.uid] = used.filters
            if (reason := uncharged.excess(used, limit, self._cgroups.bounds)) is not None:
                return number, reason
        return len(sandboxes), None

    async def _due(self, sandboxes: Sequence[NodeSandbox]) -> list[NodeSandbox]:
        """Return the sandboxes that have run since they were last inspected, busy ones first."""
        due: list[tuple[float, NodeSandbox]] = []
        known, self._inspected_at = self._inspected_at, {}
        for sandbox in sandboxes:
            used, last = self._cgroups.cpu_seconds(sandbox.cgroup), known.get(sandbox.uid)
            # A restored sandbox has a new cgroup, whose counter begins at 0.
            if last is None or not 0 <= used - last < _LEAST_CPU_SECONDS:
                due.append((used - (last or 0), sandbox))
                last = used
            self._inspected_at[sandbox.uid] = last
            if len(self._inspected_at) % _BATCH == 0:
                await asyncio.sleep(0)  # do not block the loop: there may be hundreds
        self._filters = {
            uid: size for uid, size in self._filters.items() if uid in self._inspected_at
        }
        due.sort(key=lambda one: one[0], reverse=True)
        return [sandbox for _, sandbox in due]

    def locks(self) -> LockTable:
        """Return the file locks of the machine."""
        return LockTable(_read(self._proc / "locks"))

    def inspect(
        self,
        cgroup: str,
        init: int,
        locks: LockTable,
        memory_limit: int = 0,
        thorough: bool = False,
    ) -> UnchargedMemory:
        """Measure a sandbox; processes that exit meanwhile are left out.

        What is more than the allowance for this limit may be less exact.
        """
        pids = self._cgroups.processes(cgroup)
        processes = self._processes(pids, thorough)
        tables = self._proc / str(init) / "net"
        allowed = uncharged.allowance(memory_limit, self._cgroups.bounds)
        if pids == [init]:
            return self._without_programs(processes, tables, allowed)
        devices: frozenset[str] = frozenset()
        if locks.has_file_locks:
            devices = uncharged.devices(_read(self._proc / str(init) / "mountinfo"))
        udp = [_read(tables / name) for name in ("udp", "udp6")]
        # Unread data is charged, errors are not. One number tells both.
        errors = sum(map(uncharged.unread_udp_bytes, udp)) - self._cgroups.socket_bytes(cgroup)
        return uncharged.estimate(
            processes,
            netlink=uncharged.netlink_bytes(_read(tables / "netlink")),
            udp=sum(map(uncharged.udp_bytes, udp)) + max(errors, 0),
            tcp=self._unaccepted(tables, processes, allowed),
            multicast=uncharged.multicast_bytes(_read(tables / "igmp"), _read(tables / "igmp6")),
            locks=locks.count((process.pid for process in processes), devices),
            compiled_filters=self._compiled_filters(processes),
        )

    def _without_programs(
        self, processes: Sequence[ProcessFacts], tables: Path, allowed: int
    ) -> UnchargedMemory:
        """Measure a sandbox in which only init is left.

        Sockets and locks end with the last process that has them. Init has none of programs, but
        streams, and connections of TCP outlive their process.
        """
        tcp = self._unaccepted(tables, processes, allowed)
        return uncharged.estimate(processes, netlink=0, udp=0, tcp=tcp, locks=0)

    def _unaccepted(self, tables: Path, processes: Sequence[ProcessFacts], allowed: int) -> int:
        sockets = uncharged.tcp_sockets(*(_read(tables / one) for one in ("sockstat", "sockstat6")))
        if sockets.total <= _FEW_CONNECTIONS:
            return 0
        descriptors = sum(process.descriptors for process in processes)
        least = sockets.least_bytes(descriptors)
        is_exact = descriptors * uncharged.CONNECTION_BYTES <= allowed // _ERROR_SHARE
        if is_exact or least > allowed:
            return least  # to read a table of very many takes seconds
        return sum(uncharged.unaccepted_bytes(_read(tables / name)) for name in ("tcp", "tcp6"))

    def _compiled_filters(self, processes: Sequence[ProcessFacts]) -> int | None:
        """Return the size of the machine's filters if these have many; `None` if they do not."""
        count = sum(process.own_filters for process in processes)
        if count * uncharged.FILTER_BYTES < self._cgroups.bounds.least_bytes // 2:
            return None
        return self._all_compiled_filters()

    def _all_compiled_filters(self) -> int | None:
        """Return the size of the machine's filters, or `None` if the kernel does not list it."""
        return uncharged.compiled_filter_bytes(_read(self._proc / "vmallocinfo")) or None

    def _processes(self, pids: Sequence[int], thorough: bool) -> list[ProcessFacts]:
        processes: list[ProcessFacts] = []
        for pid in pids:
            directory = self._proc / str(pid)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                status = _text(directory / "status")
                number = _descriptors(directory / "fd")
                processes.append(uncharged.process_facts(pid, status, number))
        threads = sum(process.threads - 1 for process in processes)
        if threads == 0:
            return processes
        has_many = threads > _FEW_THREADS
        return [
            process if process.threads == 1 else self._with_threads(process, has_many, thorough)
            for process in processes
        ]

    def _with_threads(self, facts: ProcessFacts, has_many: bool, thorough: bool) -> ProcessFacts:
        """Add what threads have of their own: filters, and tables of descriptors.

        All threads are read only if one of those whose turn it is has something.
        """
        tasks = self._proc / str(facts.pid) / "task"
        tids = [int(name) for name in _names(tasks)]
        others = [tid for tid in tids if tid != facts.pid]
        in_turn = others if thorough else others[self._turn % _TURNS :: _TURNS] or others
        if has_many and any(_own_filters(tasks, tid) for tid in in_turn):
            filters = sum(_own_filters(tasks, tid) for tid in others)
            facts = structs.replace(facts, thread_filters=filters)
        if not all(syscalls.same_descriptors(facts.pid, tid) for tid in in_turn):
            facts = structs.replace(facts, descriptors=_descriptors_of_all(tasks, tids))
        return facts


def _own_filters(tasks: Path, tid: int) -> int:
    """Return the number of filters that a thread may have of its own."""
    return max(uncharged.filter_count(_read(tasks / str(tid) / "status")) - 1, 0)


def _descriptors_of_all(tasks: Path, tids: Sequence[int]) -> int:
    """Return the number of descriptors in all tables that threads have."""
    descriptors = 0
    tables: list[int] = []
    for tid in tids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if not any(syscalls.same_descriptors(tid, known) for known in tables):
                descriptors += _descriptors(tasks / str(tid) / "fd")
                tables = [*tables, tid][:_MAX_TABLES]
    return descriptors


def _descriptors(directory: Path) -> int:
    """Return the number of descriptors; kernels before 6.2 do not show it as the size."""
    return os.stat(directory).st_size or len(os.listdir(directory))


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, ProcessLookupError):  # the process has exited
        return []


def _read(path: Path) -> str:
    try:
        return _text(path)
    except (FileNotFoundError, ProcessLookupError):  # the sandbox has ended
        return ""


def _text(path: Path) -> str:
    """Read a file of /proc; half the time of `Path.read_text`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts: list[bytes] = []
        while part := os.read(fd, 65_536):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode()


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
