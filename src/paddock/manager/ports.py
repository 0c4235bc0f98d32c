"""Ports of the manager: what it needs of other layers. `paddock.app` hands in the adapters."""

from datetime import datetime
from typing import Protocol

from paddock.claims.ports import ClaimAgent
from paddock.manager.sandboxes.requests import LogEntry, UsageSample
from paddock.resources.kinds.sandbox import Sandbox


class Agent(ClaimAgent, Protocol):
    """Direct access to the runtime of a sandbox: claims' calls, and usage and logs."""

    async def samples(
        self, sandbox: Sandbox, *, start: datetime | None, end: datetime | None
    ) -> tuple[UsageSample, ...]:
        """Return usage samples, oldest first."""
        ...

    async def logs(
        self, sandbox: Sandbox, *, since: datetime | None, limit: int
    ) -> tuple[LogEntry, ...]:
        """Return the last `limit` log lines, oldest first."""
        ...
