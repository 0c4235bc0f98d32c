"""The Runtime port: the operations that a driver implements to run sandboxes.

Every operation is idempotent by sandbox uid: a repeated call, after a crash or a lost reply,
finishes the work or returns the current state. Drivers do not handle pools, owners or deadlines.
Operations raise `NotFoundError` for an unknown uid (except `destroy`), `ConflictError` if the state
forbids them, `UnsupportedError` if the machine lacks the capability.
"""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from paddock.resources.kinds.template import ImagePullPolicy


class InstanceState(StrEnum):
    """The state of a sandbox as observed by the driver."""

    CREATING = "creating"
    RUNNING = "running"
    FROZEN = "frozen"
    HIBERNATED = "hibernated"
    STOPPED = "stopped"
    """Files are kept, no process runs (the `Stop` pause)."""
    FAILED = "failed"
    """It exited unexpectedly or could not be created; see `reason`."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a driver supports on this machine; callers check before they call."""

    can_freeze: bool = False
    can_checkpoint: bool = False
    """Store and restore memory and processes (hibernate, fork, memory snapshots)."""
    can_snapshot_files: bool = False
    can_stop: bool = False
    can_limit_cpu: bool = False
    can_limit_memory: bool = False
    can_limit_pids: bool = False
    can_limit_disk: bool = False
    can_limit_bandwidth: bool = False
    can_limit_io: bool = False
    """Reads of disks, and writes of direct I/O."""
    can_limit_cached_writes: bool = False
    """Also writes that the page cache delays."""
    can_filter_egress: bool = False
    can_update_image: bool = False
    """Change the image of a running sandbox in place."""
    can_pull_images: bool = False
    """Pull images by `ensure_image`; other drivers have machines that pull by themselves, with the
    pull secrets of each sandbox."""
    reasons: Mapping[str, str] = {}
    """Why a capability is missing and how to get it, by capability name."""


class Limits(Struct, frozen=True, kw_only=True):
    """Resource limits of a sandbox; `None` is the driver's default, 0 is no limit."""

    cpu_millis: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    pids: int | None = None
    ingress_bandwidth: int | None = None
    """Bits per second that it receives."""
    egress_bandwidth: int | None = None
    """Bits per second that it sends."""
    io_read_bandwidth: int | None = None
    """Bytes per second that it reads from each disk."""
    io_write_bandwidth: int | None = None
    io_read_iops: int | None = None
    """Read operations per second on each disk."""
    io_write_iops: int | None = None


class EgressPolicy(Struct, frozen=True, kw_only=True):
    """Where a sandbox may connect to. Private and link-local ranges are always denied, unless an
    operator's template sets `allow_private`. Allow takes precedence over deny."""

    allow_internet: bool = True
    allow_out: tuple[str, ...] = ()
    """Addresses, CIDRs, or domains (`*.example.com` too)."""
    deny_out: tuple[str, ...] = ()
    """Addresses or CIDRs."""
    dns_servers: tuple[str, ...] = ()
    allow_private: bool = False


class Mount(Struct, frozen=True, kw_only=True):
    """A directory of the host or a named volume, mounted in the sandbox."""

    source: str
    path: str
    read_only: bool = False


class OutboundConfig(Struct, frozen=True, kw_only=True):
    """Proxies, CA certificates and package mirrors of a sandbox. URLs may hold passwords.

    `None` is the value of the installation, an empty text is none.
    """

    http_proxy: str | None = None
    https_proxy: str | None = None
    no_proxy: tuple[str, ...] = ()
    ca_certificates: str = ""
    """In PEM format; in addition to those of the image."""
    pip_index: str | None = None
    npm_registry: str | None = None
    apt_mirror: str | None = None


class AgentConfig(Struct, frozen=True, kw_only=True):
    """The configuration of envd; set at claim, kept across pauses and restarts."""

    access_token: str | None = None
    env: Mapping[str, str] = {}
    default_user: str = "user"
    default_workdir: str | None = None
    sandbox_id: str | None = None
    template_id: str | None = None
    outbound: OutboundConfig = OutboundConfig()
    """Of the template; drivers merge it with the settings of the installation."""
    is_reserved: bool = False
    """A warm member of a pool: not claimed yet, but called right after a claim, so envd is started
    early."""
    team: str = ""
    """The team that has claimed the sandbox. Empty: none, then its namespace counts."""


class RegistryCredentials(Struct, frozen=True, kw_only=True):
    """Credentials of one registry: a user and a password, or an identity token that is exchanged
    for access tokens."""

    host: str = ""
    """Such as `registry.example:5000`; `docker.io` for Docker Hub. Empty: that of the image."""
    username: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return f"RegistryCredentials({self.host!r}, …)"


HOST_IMAGE = "host"
"""The root file system of the machine as an image: its name, and its `identity`."""


class ReadyImage(Struct, frozen=True, kw_only=True):
    """An image that sandboxes can be created from now."""

    reference: str
    """As it was requested."""
    digest: str = ""
    """Of the manifest that the registry has (of the index, if there is one). Empty: it does not
    come from a registry, or the driver leaves pulls to others."""
    identity: str = ""
    """Equal for images of equal content. Empty if the driver does not know the content."""
    location: str = ""
    """The node that has it. Empty: any."""
    pulled_bytes: int = 0
    """What this call downloaded, or the one that it has joined."""
    seconds: float = 0.0
    """How long the pull took; 0 if there was none."""


class ImagePull(Struct, frozen=True, kw_only=True):
    """A pull in progress."""

    reference: str
    team: str
    done_bytes: int = 0
    total_bytes: int = 0
    """Of all layers that are downloaded; 0 until it is known."""
    seconds: float = 0.0
    """Since it was requested."""
    is_waiting: bool = False
    """Whether it waits for its turn."""


class Blueprint(Struct, frozen=True, kw_only=True):
    """Everything a driver needs to create a sandbox."""

    uid: str
    namespace: str = "default"
    name: str = ""
    image: str = "base"
    """A name in the driver's image store; on this machine `host` is the masked host root."""
    image_digest: str = ""
    """Start from this version of the image, wherever its tag points now; see `ReadyImage`."""
    image_team: str = ""
    """The team whose access to private images counts: that of the template. Empty: none has
    access."""
    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """For drivers whose machines pull images themselves."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, for the same drivers."""
    checkpoint_id: str | None = None
    """Start from this checkpoint instead of the image."""
    restore_memory: bool = True
    """Whether to start from the memory of the checkpoint, too, if it has any."""
    limits: Limits = Limits()
    egress: EgressPolicy = EgressPolicy()
    env: Mapping[str, str] = {}
    user: str = "user"
    workdir: str | None = None
    start_command: str | None = None
    """Run by the image's shell once the sandbox is up; the sandbox outlives it."""
    ready_command: str | None = None
    """The sandbox is ready when this exits 0."""
    ready_timeout_seconds: float = 60.0
    hostname: str | None = None
    mounts: tuple[Mount, ...] = ()
    privileges: str = "sudo"
    """`sudo`: set-uid programs work inside; `locked`: nosuid and no_new_privs."""
    agent: AgentConfig = AgentConfig()
    pod_template: Mapping[str, object] | None = None
    """Overlay for drivers that create pods; others ignore it."""
    volume_claim_templates: tuple[Mapping[str, object], ...] = ()
    """Volumes to create for this sandbox alone; for drivers that create pods."""
    labels: Mapping[str, str] = {}
    incarnation: int = 1
    """The incarnation of the new instance: higher than that of any instance it replaces."""


class Address(Struct, frozen=True, kw_only=True):
    """The addresses of a sandbox."""

    ip: str | None = None
    envd: str | None = None
    """The address of envd: `unix:<path>` or `http://host:port`."""
    node: str | None = None
    """`unix:<path>` of the node, which passes out the sandbox's network namespace."""


class Instance(Struct, frozen=True, kw_only=True):
    """The current state of one sandbox."""

    uid: str
    state: InstanceState
    address: Address = Address()
    reason: str | None = None
    """Human-readable: why it failed, or what it waits for."""
    started_at: datetime | None = None
    image: str = ""
    image_digest: str = ""
    """The digest by which its registry has the image; empty: unknown, or not from a registry."""
    node_name: str | None = None
    incarnation: int = 1
    """Incremented by every restore and reset, so that older connections are not reused."""
    stored_bytes: int = 0
    """Size of its memory on disk, while it is hibernated."""
    limits_note: str = ""
    """Which limits that were requested are enforced in part, and why."""


class Usage(Struct, frozen=True, kw_only=True):
    """Resource usage of a sandbox at one time."""

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
    """One log line of a sandbox's processes or its daemon."""

    at: datetime
    level: str
    message: str
    fields: Mapping[str, str] = {}


class StoredCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint from which sandboxes can be created."""

    id: str
    source_uid: str
    has_memory: bool
    size_bytes: int
    created_at: datetime
    image: str
    base_id: str = ""
    """The checkpoint with which it shares files; empty if it shares none."""
    shared_bytes: int = 0
    """Bytes of files that are shared with it, on disk once."""


class RuntimeEvent(Struct, frozen=True, kw_only=True):
    """A change of a sandbox that no caller requested; the receiver inspects it again."""

    uid: str
    state: InstanceState
    reason: str | None = None
    memory_kills: int = 0
    """Processes that were killed for lack of memory, while the sandbox keeps running."""


class Runtime(Protocol):
    """A driver that runs sandboxes."""

    @property
    def name(self) -> str:
        """`local`, `kubernetes` or `simulated`, as shown in `status.runtime`."""
        ...

    async def capabilities(self) -> Capabilities:
        """Return what the driver supports on this machine."""
        ...

    async def ensure_image(
        self,
        reference: str,
        *,
        team: str,
        policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT,
        credentials: tuple[RegistryCredentials, ...] = (),
    ) -> ReadyImage:
        """Pull an image unless it is there, and return once sandboxes can be created from it.

        Concurrent calls for one image share a pull; one that is cancelled does not stop it.
        `credentials` are kept in memory only, for this pull. Names of the image store that do not
        come from a registry never cause a network call. Raises `NotFoundError`, `ForbiddenError`,
        `UnavailableError` or `InvalidError` with the registry's reason. Drivers whose machines pull
        images themselves return at once.
        """
        ...

    async def image_pulls(self) -> tuple[ImagePull, ...]:
        """Return the pulls in progress."""
        ...

    async def need_images(self, references: frozenset[str]) -> None:
        """Set which images templates and sandboxes name: all others may be removed."""
        ...

    async def create(self, blueprint: Blueprint) -> Instance:
        """Create the sandbox and return once envd is reachable; `start` runs its commands.

        Raises `ImageMissingError` if `ensure_image` must be called first.
        """
        ...

    async def start(self, uid: str) -> Instance:
        """Run the start command, if any, and return once the ready command succeeds."""
        ...

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        """Set envd's token and environment; kept across pauses and restarts of envd."""
        ...

    async def update_image(self, uid: str, image: str) -> Instance:
        """Restart a running sandbox from another image, with the same address and volumes; return
        once it is ready. Raise `InvalidError` if that image cannot be started."""
        ...

    async def freeze(self, uid: str) -> Instance:
        """Freeze all processes and page their memory out."""
        ...

    async def thaw(self, uid: str) -> Instance:
        """Thaw a frozen sandbox."""
        ...

    async def hibernate(self, uid: str) -> Instance:
        """Store memory and files, release everything else.

        A running sandbox that would have to wait for other work is returned frozen instead. Call
        again then: that call waits, and leaves the queue when it is cancelled.
        """
        ...

    async def restore(self, uid: str) -> Instance:
        """Restore a hibernated sandbox with files and processes, or a stopped one with files."""
        ...

    async def stop(self, uid: str) -> Instance:
        """Kill all processes, keep the files."""
        ...

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        """Store a checkpoint; the sandbox is paused only meanwhile."""
        ...

    async def fork(self, uid: str, children: tuple[Blueprint, ...]) -> tuple[Instance | str, ...]:
        """Create clones of a running sandbox; return each child's instance or error message."""
        ...

    async def delete_checkpoint(self, checkpoint_id: str) -> None:
        """Delete a checkpoint; an unknown id is no error."""
        ...

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """List checkpoints."""
        ...

    async def destroy(self, uid: str) -> None:
        """Kill a sandbox and remove everything it has; an unknown uid is no error."""
        ...

    async def inspect(self, uid: str) -> Instance | None:
        """Return the state of a sandbox, or `None` for an unknown uid."""
        ...

    async def instances(self) -> tuple[Instance, ...]:
        """Return the states of all sandboxes."""
        ...

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        """Replace the egress policy of a running sandbox; it takes effect at once."""
        ...

    async def usage(self, uid: str) -> Usage:
        """Return the resource usage of a sandbox."""
        ...

    async def logs(
        self, uid: str, *, since: datetime | None = None, limit: int = 1000
    ) -> tuple[LogLine, ...]:
        """Return recent log lines, oldest first."""
        ...

    def watch(self) -> AsyncIterator[RuntimeEvent]:
        """Stream changes that no caller requested (exit, out of memory, node restarted)."""
        ...
