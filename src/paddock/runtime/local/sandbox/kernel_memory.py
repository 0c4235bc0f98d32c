"""Kills sandboxes that take kernel memory which no limit counts.

`inspect` reads from /proc what the processes of one sandbox hold; `kernel/uncharged.py` judges it.
A sandbox that has used no CPU time since it was last inspected holds what it held then, so an idle
one costs the read of a counter.
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
from paddock.runtime.local.kernel.uncharged import LockTable, ProcessFacts, UnchargedMemory
from paddock.runtime.local.sandbox.sandbox import NodeSandbox

log = logging.getLogger(__name__)

RunInThread = Callable[..., Awaitable[Any]]
_LEAST_CPU_SECONDS = 0.001
_FEW_CONNECTIONS = 4096
"""Up to this number, the table of TCP connections is not read: it takes long."""
_FEW_THREADS = 16
"""Up to this number, filters of threads are not read: those of one take up to 0.8 MiB."""
_TURNS = 4
"""Each inspection first reads one of so many threads."""
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
        self._turn = 0

    async def check_all(self, sandboxes: Sequence[NodeSandbox]) -> None:
        """Kill those of all sandboxes with processes that hold more than their limit allows."""
        self._turn += 1
        due = await self._due(sandboxes)
        if not due:
            return
        locks = await self._run_in_thread(self.locks)
        for sandbox in due:
            init = sandbox.record.init
            if init is None:
                continue
            used = await self._run_in_thread(self.inspect, sandbox.cgroup, init.pid, locks)
            reason = uncharged.excess(used, sandbox.limits.memory_bytes or _machine_memory())
            # Its cgroup may belong to another sandbox by now.
            if reason is not None and sandbox.record.init == init:
                log.warning(
                    "sandbox killed for kernel memory",
                    extra=fields(sandbox=sandbox.uid, reason=reason),
                )
                sandbox.kill_reason = reason
                self._cgroups.kill(sandbox.cgroup)

    async def _due(self, sandboxes: Sequence[NodeSandbox]) -> list[NodeSandbox]:
        """Return the sandboxes that have run since they were last inspected."""
        due: list[NodeSandbox] = []
        known, self._inspected_at = self._inspected_at, {}
        for sandbox in sandboxes:
            used, last = self._cgroups.cpu_seconds(sandbox.cgroup), known.get(sandbox.uid)
            # A restored sandbox has a new cgroup, whose counter begins at 0.
            if last is None or not 0 <= used - last < _LEAST_CPU_SECONDS:
                due.append(sandbox)
                last = used
            self._inspected_at[sandbox.uid] = last
            await asyncio.sleep(0)  # do not block the loop: there may be hundreds
        return due

    def locks(self) -> LockTable:
        """Return the file locks of the machine."""
        return LockTable(_read(self._proc / "locks"))

    def inspect(self, cgroup: str, init: int, locks: LockTable) -> UnchargedMemory:
        """Measure a sandbox; processes that exit meanwhile are left out."""
        processes = self._processes(cgroup)
        tables = self._proc / str(init) / "net"
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
            tcp=self._unaccepted(tables),
            multicast=uncharged.multicast_bytes(_read(tables / "igmp"), _read(tables / "igmp6")),
            locks=locks.count((process.pid for process in processes), devices),
            compiled_filters=self._compiled_filters(processes),
        )

    def _unaccepted(self, tables: Path) -> int:
        sockstats = (_read(tables / name) for name in ("sockstat", "sockstat6"))
        if uncharged.tcp_sockets(*sockstats) <= _FEW_CONNECTIONS:
            return 0
        return sum(uncharged.unaccepted_bytes(_read(tables / name)) for name in ("tcp", "tcp6"))

    def _compiled_filters(self, processes: Sequence[ProcessFacts]) -> int | None:
        """Return the size of the machine's filters if threads have many; `None` if they do not."""
        count = sum(process.thread_filters for process in processes)
        if count * uncharged.FILTER_BYTES < uncharged.allowance(0) // 2:
            return None
        return uncharged.compiled_filter_bytes(_read(self._proc / "vmallocinfo"))

    def _processes(self, cgroup: str) -> list[ProcessFacts]:
        processes: list[ProcessFacts] = []
        for pid in self._cgroups.processes(cgroup):
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
            process if process.threads == 1 else self._with_threads(process, has_many)
            for process in processes
        ]

    def _with_threads(self, facts: ProcessFacts, has_many: bool) -> ProcessFacts:
        """Add what threads have of their own: filters, and tables of descriptors."""
        descriptors = 0
        tables: list[int] = []
        tasks = self._proc / str(facts.pid) / "task"
        tids = [int(name) for name in _names(tasks)]
        filters = self._filters(tasks, [t for t in tids if t != facts.pid]) if has_many else 0
        for tid in tids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not any(syscalls.same_descriptors(tid, known) for known in tables):
                    descriptors += _descriptors(tasks / str(tid) / "fd")
                    tables = [*tables, tid][:_MAX_TABLES]
        return structs.replace(facts, thread_filters=filters, descriptors=descriptors)

    def _filters(self, tasks: Path, tids: Sequence[int]) -> int:
        """Return the number of filters of threads; 0 if those whose turn it is have none."""

        def own(tid: int) -> int:
            return max(uncharged.filter_count(_read(tasks / str(tid) / "status")) - 1, 0)

        if not any(map(own, tids[self._turn % _TURNS :: _TURNS])):
            return 0
        return sum(map(own, tids))


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
