"""Parameters and results of the manager's use cases, independent of the protocol."""

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from paddock.kit.errors import PaddockError
from paddock.resources.kinds.sandbox import Sandbox


class SandboxFilter(Struct, frozen=True, kw_only=True):
    """Which sandboxes to list."""

    states: frozenset[str] = frozenset({"running", "paused"})
    metadata: Mapping[str, str] = {}
    template: str | None = None
    started_after: datetime | None = None


class SandboxPage(Struct, frozen=True):
    """One page of a list of sandboxes."""

    items: tuple[Sandbox, ...]
    next_token: str | None
    total_running: int


class UsageSample(Struct, frozen=True, kw_only=True):
    """The resource usage of a sandbox at one moment."""

    at: datetime
    cpu_count: float
    cpu_used_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    memory_cache_bytes: int
    disk_used_bytes: int
    disk_total_bytes: int


class LogEntry(Struct, frozen=True, kw_only=True):
    """One line of a sandbox's log."""

    at: datetime
    level: str
    message: str
    fields: Mapping[str, str] = {}


class ForkResult(Struct, frozen=True):
    """One fork: the sandbox, or the error."""

    sandbox: Sandbox | None
    error: PaddockError | None = None
