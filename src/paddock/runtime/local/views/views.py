"""The views of all sandboxes of a node: their files, the server that writes them, their CPUs."""

import contextlib
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from paddock.kit.errors import UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.kernel.cgroups import Cgroups
from paddock.runtime.local.views.balance import CpuUse, plan
from paddock.runtime.local.views.cpus import CpuChoice
from paddock.runtime.local.views.files import ShownLimits, ViewFiles
from paddock.runtime.local.views.server import ViewServer
from paddock.runtime.port import Limits

log = logging.getLogger(__name__)

_PASSES = 3
"""Over the threads of a slot that is moved: a thread may be forked with the old CPUs meanwhile."""

Bind = tuple[str, str]
"""The path of a file on the host, and its mount point inside."""


class ResourceViews:
    """Lets each sandbox see its own limits and usage instead of the machine's.

    Names are those of slots. Nothing is shown differently on a node without root or cgroups.
    """

    def __init__(self, root: Path, cache: Path, cgroups: Cgroups, first_id: int) -> None:
        self.unavailable_reason = ""
        self._files = ViewFiles(root)
        self._cpus = CpuChoice()
        self._cgroups = cgroups
        self._samples: dict[str, tuple[float, float]] = {}
        self._uses: dict[str, CpuUse] = {}
        parents = cgroups.parents() if cgroups.is_usable and os.geteuid() == 0 else None
        self._server: ViewServer | None = None
        if parents is None:
            self.unavailable_reason = "it needs root and cgroups"
        else:
            self._server = ViewServer(cache, (str(root), str(first_id), *parents))

    @property
    def server_pid(self) -> int | None:
        """The pid of the view server, or `None` if it does not run."""
        return self._server.pid if self._server is not None else None

    def open(self) -> None:
        """Mount the files and start the server."""
        if self._server is None:
            return
        self._files.mount()
        try:
            self._server.start()
        except UnavailableError as problem:
            self._server = None
            self.unavailable_reason = problem.message
            log.warning("sandboxes see the machine's resources", extra=fields(reason=problem))

    def close(self, *, purge: bool) -> None:
        """Stop the server; with `purge`, also remove the files."""
        if self._server is not None:
            self._server.stop()
        if purge:
            self._files.unmount()

    def check(self) -> None:
        """Start the server again if it has exited."""
        if self._server is not None:
            self._server.restart_if_ended()

    def binds(self, name: str, limits: Limits, boot_id: str) -> tuple[Bind, ...]:
        """Create the files of a new sandbox; return what to mount."""
        return self._create(name, limits, boot_id) if self._server is not None else ()

    def restore_binds(
        self, name: str, limits: Limits, boot_id: str, sizes: Mapping[str, int]
    ) -> tuple[Bind, ...]:
        """Create the files of a restored sandbox, which may need them even without a server.

        A process that has one open is restored only if the file has the stored size; the next read
        corrects it.
        """
        if os.geteuid() != 0:
            return ()
        binds = self._create(name, limits, boot_id)
        for path, point in binds:
            if point in sizes:
                os.truncate(path, sizes[point])
        return binds

    def limit(self, name: str, limits: Limits) -> None:
        """Show other limits of an existing sandbox."""
        if self._server is not None:
            self._files.limit(name, self._shown(limits))

    def cpus(self, name: str, limits: Limits) -> frozenset[int]:
        """Return the CPUs that the processes of a slot may run on."""
        return self._cpus.choose(name, limits.cpu_millis)

    def adopt(self, name: str, limits: Limits, pid: int) -> None:
        """Record the CPUs of a running sandbox."""
        self._cpus.assign(name, os.sched_getaffinity(pid), limits.cpu_millis)

    def sample(self, name: str, now: float) -> None:
        """Record how much CPU a running slot has used since the last sample (seconds)."""
        cpus = self._cpus.restricted(name)
        if cpus is None:
            return
        used = self._cgroups.cpu_seconds(name)
        before = self._samples.get(name)
        self._samples[name] = (now, used)
        if before is not None and now > before[0] and used >= before[1]:
            self._uses[name] = CpuUse(cpus, (used - before[1]) / (now - before[0]))

    def rebalance(self) -> None:
        """Move busy slots from the most used CPUs to the least used, by the last samples."""
        uses, self._uses = self._uses, {}
        for name, cpus in plan(uses, self._cpus.all).items():
            if self._cpus.restricted(name) == uses[name].cpus:
                self._cpus.move(name, cpus)
                self._move_threads(name, uses[name].cpus, cpus)

    def _move_threads(self, name: str, before: frozenset[int], now: frozenset[int]) -> None:
        """Move the threads that did not choose other CPUs themselves."""
        for _ in range(_PASSES):
            is_done = True
            for tid in self._cgroups.threads(name):
                with contextlib.suppress(ProcessLookupError):
                    if frozenset(os.sched_getaffinity(tid)) == before:
                        os.sched_setaffinity(tid, now)
                        is_done = False
            if is_done:  # none was forked meanwhile
                return

    def remove(self, name: str) -> None:
        """Remove what a slot has."""
        self._samples.pop(name, None)
        self._uses.pop(name, None)
        self._cpus.release(name)
        self._files.remove(name)

    def names(self) -> set[str]:
        """Return the slots that have files."""
        return self._files.names()

    def _create(self, name: str, limits: Limits, boot_id: str) -> tuple[Bind, ...]:
        self._files.mount()
        shown = self._shown(limits)
        # Without a running server nobody would fill them: the machine's are better than empty ones.
        return self._files.create(name, shown, boot_id, copy_machine=self.server_pid is None)

    def _shown(self, limits: Limits) -> ShownLimits:
        return ShownLimits(
            memory_bytes=limits.memory_bytes or 0, cpus=self._cpus.count(limits.cpu_millis)
        )


def new_boot_id() -> str:
    """Return the boot id of a sandbox that starts without stored memory."""
    return str(uuid.uuid4())
