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

from paddock.kit.logs import fields
from paddock.runtime.local.kernel import uncharged
from paddock.runtime.local.kernel.cgroups import Cgroups
from paddock.runtime.local.kernel.uncharged import LockTable, ProcessFacts, UnchargedMemory
from paddock.runtime.local.sandbox.sandbox import NodeSandbox

log = logging.getLogger(__name__)

RunInThread = Callable[..., Awaitable[Any]]
_LEAST_CPU_SECONDS = 0.001


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

    async def check_all(self, sandboxes: Sequence[NodeSandbox]) -> None:
        """Kill those of all sandboxes with processes that hold more than their limit allows."""
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
        processes = [
            facts
            for pid in self._cgroups.processes(cgroup)
            if (facts := self._process(pid)) is not None
        ]
        tables = self._proc / str(init) / "net"
        devices: frozenset[str] = frozenset()
        if locks.has_file_locks:
            devices = uncharged.devices(_read(self._proc / str(init) / "mountinfo"))
        return uncharged.estimate(
            processes,
            netlink=uncharged.netlink_bytes(_read(tables / "netlink")),
            udp=sum(uncharged.udp_bytes(_read(tables / name)) for name in ("udp", "udp6")),
            locks=locks.count((process.pid for process in processes), devices),
        )

    def _process(self, pid: int) -> ProcessFacts | None:
        directory = self._proc / str(pid)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (directory / "status").read_text()
            return uncharged.process_facts(pid, status, _descriptors(directory / "fd"))
        return None


def _descriptors(directory: Path) -> int:
    """Return the number of descriptors; kernels before 6.2 do not show it as the size."""
    return os.stat(directory).st_size or len(os.listdir(directory))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the sandbox has ended
        return ""


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
