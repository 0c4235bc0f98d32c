"""The Runtime port: what a driver must do to run sandboxes.

Every operation is idempotent by sandbox uid: called again after a crash or a lost reply it
finishes what was begun or reports what is. A driver knows nothing of pools, owners or deadlines.
Operations raise `NotFoundError` for a uid it does not know (except `destroy`, which is content),
`ConflictError` where the state forbids, `UnsupportedError` where the machine cannot.
"""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from msgspec import Struct


class InstanceState(StrEnum):
    """What a sandbox is doing, as the machine sees it."""

    CREATING = "creating"
    RUNNING = "running"
    FROZEN = "frozen"
    HIBERNATED = "hibernated"
    STOPPED = "stopped"
    """Files are kept, nothing runs (the `Stop` pause)."""
    FAILED = "failed"
    """It ended by itself or could not be made; `reason` says why."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a driver can do here; a caller refuses clearly instead of trying."""

    can_freeze: bool = False
    can_checkpoint: bool = False
    """Memory and processes can be stored and restored (hibernate, fork, memory snapshots)."""
    can_snapshot_files: bool = False
    can_stop: bool = False
    can_limit_cpu: bool = False
    can_limit_memory: bool = False
    can_limit_pids: bool = False
    can_limit_disk: bool = False
    can_filter_egress: bool = False
    can_update_image: bool = False
    """A running sandbox can be given another image without being made anew."""
    reasons: Mapping[str, str] = {}
    """Why something is missing, by capability name, with what to do about it."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one sandbox may use; `None` is the driver's default, 0 is no limit."""

    cpu_millis: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    pids: int | None = None


class EgressPolicy(Struct, frozen=True, kw_only=True):
    """Where a sandbox may connect to. Private and link-local ranges are denied whatever this says,
    unless `allow_private` is set by an operator's template. Allow beats deny."""

    allow_internet: bool = True
    allow_out: tuple[str, ...] = ()
    """Addresses, CIDRs, or domains (`*.example.com` too)."""
    deny_out: tuple[str, ...] = ()
    """Addresses or CIDRs."""
    dns_servers: tuple[str, ...] = ()
    allow_private: bool = False


class Mount(Struct, frozen=True, kw_only=True):
    """A directory of the host or a named volume, seen inside."""

    source: str
    path: str
    read_only: bool = False


class AgentConfig(Struct, frozen=True, kw_only=True):
    """What envd must know to serve a sandbox; given at claim, kept over pause and restart."""

    access_token: str | None = None
    env: Mapping[str, str] = {}
    default_user: str = "user"
    default_workdir: str | None = None
    sandbox_id: str | None = None
    template_id: str | None = None
    is_reserved: bool = False
    """In stock: nobody's yet, but whoever gets it calls at once, so envd is kept at hand."""


class Blueprint(Struct, frozen=True, kw_only=True):
    """Everything a driver needs to make one sandbox."""

    uid: str
    namespace: str = "default"
    name: str = ""
    image: str = "base"
    """A name in the driver's image store; on this machine `host` is the masked host root."""
    checkpoint_id: str | None = None
    """Start from this stored state instead of the bare image."""
    limits: Limits = Limits()
    egress: EgressPolicy = EgressPolicy()
    env: Mapping[str, str] = {}
    user: str = "user"
    workdir: str | None = None
    start_command: str | None = None
    """Run by `bash -l -c` once the sandbox is up; its end does not end the sandbox."""
    ready_command: str | None = None
    """The sandbox is ready when this exits 0."""
    ready_timeout_seconds: float = 60.0
    hostname: str | None = None
    mounts: tuple[Mount, ...] = ()
    privileges: str = "sudo"
    """`sudo`: set-uid programs work inside; `locked`: nosuid and no_new_privs."""
    agent: AgentConfig = AgentConfig()
    pod_template: Mapping[str, object] | None = None
    """Overlay for drivers that make pods; others ignore it."""
    volume_claim_templates: tuple[Mapping[str, object], ...] = ()
    """Volumes made for this sandbox alone, by drivers that make pods."""
    labels: Mapping[str, str] = {}


class Address(Struct, frozen=True, kw_only=True):
    """How a sandbox is reached."""

    ip: str | None = None
    envd: str | None = None
    """`unix:<path>` or `http://host:port`: where envd answers."""
    node: str | None = None
    """`unix:<path>` of the node that hands out sockets born in the sandbox's network namespace."""


class Instance(Struct, frozen=True, kw_only=True):
    """One sandbox as the driver sees it now."""

    uid: str
    state: InstanceState
    address: Address = Address()
    reason: str | None = None
    """For people: why it failed, or what it waits for."""
    started_at: datetime | None = None
    image: str = ""
    node_name: str | None = None
    incarnation: int = 1
    """Grows with every restore, so that connections of an earlier life are never reused."""


class Usage(Struct, frozen=True, kw_only=True):
    """What a sandbox uses at one moment."""

    at: datetime
    cpu_count: float
    cpu_used_percent: float
    cpu_seconds: float
    memory_used_bytes: int
    memory_total_bytes: int
    memory_cache_bytes: int
    disk_used_bytes: int
    disk_total_bytes: int


class LogLine(Struct, frozen=True, kw_only=True):
    """One line that a sandbox's own processes or its daemon wrote."""

    at: datetime
    level: str
    message: str
    fields: Mapping[str, str] = {}


class StoredCheckpoint(Struct, frozen=True, kw_only=True):
    """A stored state from which sandboxes start."""

    id: str
    source_uid: str
    has_memory: bool
    size_bytes: int
    created_at: datetime
    image: str


class RuntimeEvent(Struct, frozen=True, kw_only=True):
    """Something about a sandbox changed without being asked: look at it again."""

    uid: str
    state: InstanceState
    reason: str | None = None


class Runtime(Protocol):
    """A driver."""

    @property
    def name(self) -> str:
        """`local`, `kubernetes`, `simulated`: what `status.runtime` shows."""
        ...

    async def capabilities(self) -> Capabilities:
        """Say what can be done here."""
        ...

    async def create(self, blueprint: Blueprint) -> Instance:
        """Make the sandbox and return once envd can answer; `start` runs its commands."""
        ...

    async def start(self, uid: str) -> Instance:
        """Run the start command where there is one, and return once the ready command agrees."""
        ...

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        """Give envd its token and environment; kept over every pause and restart of envd."""
        ...

    async def update_image(self, uid: str, image: str) -> Instance:
        """Start a running sandbox anew from another image, at the same address and with the same
        volumes; return once it is ready. `InvalidError` where that image cannot be started."""
        ...

    async def freeze(self, uid: str) -> Instance:
        """Stop all processes where they are and give their memory back to the machine."""
        ...

    async def thaw(self, uid: str) -> Instance:
        """Let a frozen sandbox go on."""
        ...

    async def hibernate(self, uid: str) -> Instance:
        """Store memory and files, free everything else."""
        ...

    async def restore(self, uid: str) -> Instance:
        """Bring a hibernated (or stopped) sandbox back: same files, same processes where stored."""
        ...

    async def stop(self, uid: str) -> Instance:
        """End all processes, keep the files."""
        ...

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        """Store the state under an id; the sandbox pauses only as long as that takes."""
        ...

    async def fork(self, uid: str, children: tuple[Blueprint, ...]) -> tuple[Instance | str, ...]:
        """Make clones of a running sandbox; each child's instance, or why not."""
        ...

    async def delete_checkpoint(self, checkpoint_id: str) -> None:
        """Forget a stored state; unknown ids are no error."""
        ...

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """List stored states."""
        ...

    async def destroy(self, uid: str) -> None:
        """End it and remove every trace; unknown uids are no error."""
        ...

    async def inspect(self, uid: str) -> Instance | None:
        """Say what is, or `None` for a uid nobody knows."""
        ...

    async def instances(self) -> tuple[Instance, ...]:
        """Say what is, for all."""
        ...

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        """Replace the egress policy of a living sandbox at once."""
        ...

    async def usage(self, uid: str) -> Usage:
        """Measure one sandbox."""
        ...

    async def logs(
        self, uid: str, *, since: datetime | None = None, limit: int = 1000
    ) -> tuple[LogLine, ...]:
        """Give recent log lines, oldest first."""
        ...

    def watch(self) -> AsyncIterator[RuntimeEvent]:
        """Stream unasked changes (a sandbox died, ran out of memory, its node came back)."""
        ...
