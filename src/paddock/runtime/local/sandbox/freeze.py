"""Freezing sandboxes in memory with the cgroup freezer, and paging their memory out.

Hibernate, restore, snapshot, fork and stop are in `hibernation.py`.
"""

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.kit.logs import fields
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.sandbox.lifecycle import UP, SandboxLifecycle
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.port import Instance, InstanceState

log = logging.getLogger(__name__)

_IOV_MAX = 1024
_FREEZE_POLL_SECONDS = (
    *(0.0, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0),
    *(2.0,) * 5,
)
"""About 12 s in all: every process must be scheduled once before it is frozen."""


class SandboxFreezer:
    """Freezes and thaws the sandboxes of one node."""

    def __init__(self, lifecycle: SandboxLifecycle) -> None:
        self._lifecycle = lifecycle
        self._context = lifecycle.context

    async def freeze(self, uid: str) -> Instance:
        """Freeze all processes; their memory is paged out in the background."""
        async with self._lifecycle.lock(uid):
            return await self.freeze_locked(self._lifecycle.get(uid))

    async def freeze_locked(self, sandbox: NodeSandbox) -> Instance:
        """Freeze a sandbox whose lock the caller holds."""
        sandbox.expect(*UP, doing="frozen")
        if sandbox.record.state is InstanceState.FROZEN:
            return sandbox.instance()
        await self.freeze_processes(sandbox)
        sandbox.save(state=InstanceState.FROZEN)
        self._lifecycle.spawn(f"page out {sandbox.uid}", self._page_out(sandbox))
        return sandbox.instance()

    async def thaw(self, uid: str) -> Instance:
        """Thaw all processes."""
        async with self._lifecycle.lock(uid):
            sandbox = self._lifecycle.get(uid)
            sandbox.expect(*UP, doing="thawed")
            if sandbox.record.state is InstanceState.FROZEN:
                self.unfreeze_processes(sandbox)
                sandbox.save(state=InstanceState.RUNNING)
            return sandbox.instance()

    async def freeze_processes(self, sandbox: NodeSandbox) -> None:
        """Freeze the cgroup and wait until every process is frozen."""
        self._require_cgroups()
        groups, name = self._context.cgroups, sandbox.cgroup
        groups.freeze(name, frozen=True)
        for pause in _FREEZE_POLL_SECONDS:
            if pause:
                await asyncio.sleep(pause)
            if groups.is_frozen(name):
                return
        groups.freeze(name, frozen=False)
        raise UnavailableError(
            f"cannot freeze sandbox {sandbox.uid}: a process is in uninterruptible sleep (D state)",
            retry_after_seconds=1.0,
        )

    def unfreeze_processes(self, sandbox: NodeSandbox) -> None:
        self._context.cgroups.freeze(sandbox.cgroup, frozen=False)

    def _require_cgroups(self) -> None:
        if not self._context.cgroups.is_usable:
            raise UnsupportedError(
                "cannot freeze sandboxes: this node has no writable cgroup v2 hierarchy",
                hint="run the node as root with cgroup2 mounted",
            )

    async def _page_out(self, sandbox: NodeSandbox) -> None:
        """Page out the memory of a frozen sandbox; stop when the sandbox is thawed."""
        if not has_swap():
            return
        began = sandbox.record.incarnation
        freed = 0
        for pid in self._context.cgroups.processes(sandbox.cgroup):
            if sandbox.record.state is not InstanceState.FROZEN:
                return
            if sandbox.record.incarnation != began:
                return
            with contextlib.suppress(OSError):
                freed += await self._context.run_in_thread(page_out, pid)
        log.debug("memory paged out", extra=fields(sandbox=sandbox.uid, bytes=freed))


def has_swap() -> bool:
    """Whether the machine has swap (a disk or zram)."""
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


def page_out(pid: int) -> int:
    """Advise the kernel to reclaim a process's anonymous memory; return the bytes advised.

    Mapped files are skipped: their pages are shared with other sandboxes, the kernel drops them
    under memory pressure, and reading them back would delay the thaw.
    """
    pidfd = os.pidfd_open(pid)
    try:
        ranges: list[tuple[int, int]] = []
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            if inode != "0" or (path and path[0].startswith("[v")):  # vdso, vvar, vsyscall
                continue
            start, _, end = span.partition("-")
            ranges.append((int(start, 16), int(end, 16) - int(start, 16)))
        advised = 0
        for at in range(0, len(ranges), _IOV_MAX):
            with contextlib.suppress(OSError):
                advised += syscalls.process_madvise(
                    pidfd, ranges[at : at + _IOV_MAX], syscalls.MADV_PAGEOUT
                )
        return advised
    finally:
        os.close(pidfd)
