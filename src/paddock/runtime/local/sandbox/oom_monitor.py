"""Reports processes of sandboxes that were killed for lack of memory: log, sandbox log, event.

The kernel counts OOM kills per cgroup. `check` compares the count with the one in the sandbox's
record. A sandbox whose processes are killed again and again is reported once per minute.
"""

import contextlib
import logging
from collections.abc import Callable

from paddock.kit.clock import Clock
from paddock.kit.logs import fields
from paddock.runtime.local.kernel.cgroups import Cgroups
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.port import RuntimeEvent

log = logging.getLogger(__name__)

REPORT_SECONDS = 60.0
"""At most one report per sandbox in this time."""
_EXIT_SECONDS = 5.0
"""A sandbox that exits this long after a kill exits because of it."""


class OomMonitor:
    """Finds and reports the OOM kills of a node's sandboxes."""

    def __init__(
        self, cgroups: Cgroups, clock: Clock, publish: Callable[[RuntimeEvent], None]
    ) -> None:
        self._cgroups = cgroups
        self._clock = clock
        self._publish = publish
        self._unreported: dict[str, int] = {}
        self._reported_at: dict[str, float] = {}
        self._killed_at: dict[str, float] = {}

    def check(self, sandbox: NodeSandbox) -> None:
        """Report the kills of a running sandbox since the last report, if one is due."""
        uid, now = sandbox.uid, self._clock.monotonic()
        kills = self._cgroups.oom_kills(sandbox.cgroup)
        if kills > (known := sandbox.record.oom_kills):
            sandbox.save(oom_kills=kills)
            self._killed_at[uid] = now
            self._unreported[uid] = self._unreported.get(uid, 0) + kills - known
        last = self._reported_at.get(uid)
        if uid in self._unreported and (last is None or now - last >= REPORT_SECONDS):
            self._reported_at[uid] = now
            self._report(sandbox, self._unreported.pop(uid))

    def _report(self, sandbox: NodeSandbox, count: int) -> None:
        cause = self._cgroups.oom_cause(sandbox.cgroup)
        log.warning(
            "processes of a sandbox were killed for lack of memory",
            extra=fields(sandbox=sandbox.uid, reason=cause, killed=count),
        )
        with contextlib.suppress(OSError):  # a full disk
            sandbox.log_file.write(f"killed: {cause}", level="warn", processes=str(count))
        self._publish(
            RuntimeEvent(
                uid=sandbox.uid,
                state=sandbox.record.state,
                reason=f"processes were killed: {cause}",
                memory_kills=count,
            )
        )

    def exit_cause(self, sandbox: NodeSandbox) -> str | None:
        """Return the cause if a sandbox whose init has exited ran out of memory."""
        if not self._cgroups.is_usable:
            return None
        killed_at = self._killed_at.get(sandbox.uid, float("-inf"))
        is_recent = self._clock.monotonic() - killed_at < _EXIT_SECONDS
        if is_recent or self._cgroups.oom_kills(sandbox.cgroup) > sandbox.record.oom_kills:
            return self._cgroups.oom_cause(sandbox.cgroup)
        return None

    def forget(self, uid: str) -> None:
        """Drop what is known of a destroyed sandbox."""
        for known in (self._unreported, self._reported_at, self._killed_at):
            known.pop(uid, None)
