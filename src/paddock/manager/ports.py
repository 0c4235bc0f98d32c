"""What the manager needs of the outside and may not import: handed in by `paddock.app`."""

from datetime import datetime
from typing import Protocol

from paddock.claims import ports
from paddock.manager.sandboxes.requests import LogEntry, Sample
from paddock.resources.kinds.sandbox import Sandbox


class Agent(ports.Agent, Protocol):
    """The way to what runs a sandbox, for things that cannot wait for a reconcile."""

    async def samples(
        self, sandbox: Sandbox, *, start: datetime | None, end: datetime | None
    ) -> tuple[Sample, ...]:
        """Give what a sandbox used, oldest first."""
        ...

    async def logs(
        self, sandbox: Sandbox, *, since: datetime | None, limit: int
    ) -> tuple[LogEntry, ...]:
        """Give a sandbox's log lines, oldest first."""
        ...
