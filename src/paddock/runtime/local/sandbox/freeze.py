"""Pausing sandboxes: frozen in place, with their memory given back.

What stores memory (hibernate, restore, snapshot, fork) and what keeps files only (stop) is in
`keeping`.
"""

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.kit.logs import fields
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.sandbox.lifecycle import UP, Sandboxes
from paddock.runtime.local.sandbox.sandbox import Sandbox
from paddock.runtime.port import Instance, InstanceState

log = logging.getLogger(__name__)

_IOV_MAX = 1024
_FREEZE_PAUSES = (
    *(0.0, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0),
    *(2.0,) * 5,
)
"""Some 12 s in all: on a busy machine every process has to get its turn before it stands."""


class Pausing:
    """Freezes and thaws."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._machine = sandboxes.machine

    async def freeze(self, uid: str) -> Instance:
        """Stop all processes where they are; their memory goes out in the background."""
        async with self._sandboxes.turn(uid):
            sandbox = self._sandboxes.get(uid)
            sandbox.expect(*UP, doing="frozen")
            if sandbox.record.state is InstanceState.FROZEN:
                return sandbox.instance()
            await self.stand_still(sandbox)
            sandbox.save(state=InstanceState.FROZEN)
            self._sandboxes.spawn(f"page out {uid}", self._page_out(sandbox))
            return sandbox.instance()

    async def thaw(self, uid: str) -> Instance:
        """Let all processes go on."""
        async with self._sandboxes.turn(uid):
            sandbox = self._sandboxes.get(uid)
            sandbox.expect(*UP, doing="thawed")
            if sandbox.record.state is InstanceState.FROZEN:
                self.go_on(sandbox)
                sandbox.save(state=InstanceState.RUNNING)
            return sandbox.instance()

    async def stand_still(self, sandbox: Sandbox) -> None:
        """Freeze and wait until every process stands."""
        self._need_groups()
        groups, name = self._machine.cgroups, sandbox.group
        groups.freeze(name, frozen=True)
        for pause in _FREEZE_PAUSES:
            if pause:
                await asyncio.sleep(pause)
            if groups.is_frozen(name):
                return
        groups.freeze(name, frozen=False)
        raise UnavailableError(
            f"sandbox {sandbox.uid} does not stand still: a process of it waits in the kernel",
            retry_after_seconds=1.0,
        )

    def go_on(self, sandbox: Sandbox) -> None:
        """Thaw."""
        self._machine.cgroups.freeze(sandbox.group, frozen=False)

    def _need_groups(self) -> None:
        if not self._machine.cgroups.is_usable:
            raise UnsupportedError(
                "sandboxes cannot be frozen here: there is no cgroup v2 this node may write to",
                hint="run the node as root with cgroup2 mounted",
            )

    async def _page_out(self, sandbox: Sandbox) -> None:
        """Push a frozen sandbox's memory out; it stops as soon as the sandbox goes on."""
        if not has_swap():
            return
        began = sandbox.record.incarnation
        freed = 0
        for pid in self._machine.cgroups.processes(sandbox.group):
            if sandbox.record.state is not InstanceState.FROZEN:
                return
            if sandbox.record.incarnation != began:
                return
            with contextlib.suppress(OSError):
                freed += await self._machine.work(page_out, pid)
        log.debug("memory pushed out", extra=fields(sandbox=sandbox.uid, bytes=freed))


def has_swap() -> bool:
    """Tell whether there is anywhere to push memory to (swap on disk or zram)."""
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


def page_out(pid: int) -> int:
    """Advise the kernel to reclaim a process's own memory; gives the bytes it was told about.

    Mapped files are left alone: their pages are shared with other sandboxes, the kernel drops them
    by itself when it is short of memory, and whoever wakes would wait for the disk.
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
        told = 0
        for at in range(0, len(ranges), _IOV_MAX):
            with contextlib.suppress(OSError):
                told += syscalls.process_madvise(
                    pidfd, ranges[at : at + _IOV_MAX], syscalls.MADV_PAGEOUT
                )
        return told
    finally:
        os.close(pidfd)
