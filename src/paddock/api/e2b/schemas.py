"""Bodies of E2B's API. Unknown fields are ignored, for newer clients."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, field

Seconds = Annotated[int, Meta(ge=0, le=10**9)]


class E2BBody(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of every body."""


class E2BResponse(E2BBody, frozen=True, kw_only=True, omit_defaults=False):
    """Base of responses: clients expect every field."""


class AutoResume(E2BBody, frozen=True, kw_only=True):
    """Whether traffic wakes a paused sandbox."""

    enabled: bool = False


class EgressProxy(E2BBody, frozen=True, kw_only=True):
    """An egress proxy; not supported."""

    address: str = ""


class NetworkConfig(E2BBody, frozen=True, kw_only=True):
    """Egress and ingress rules of a sandbox."""

    allow_public_traffic: bool | UnsetType = UNSET
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    dns_servers: tuple[str, ...] = ()
    egress_proxy: EgressProxy | None = None
    mask_request_host: str | None = None
    rules: Mapping[str, Any] | None = None


class NetworkUpdate(E2BBody, frozen=True, kw_only=True):
    """A new egress policy; it replaces the old one entirely."""

    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    dns_servers: tuple[str, ...] = ()
    egress_proxy: EgressProxy | None = None
    rules: Mapping[str, Any] | None = None
    allow_internet_access: bool | None = field(default=None, name="allow_internet_access")


class NetworkPartView(E2BBody, frozen=True, kw_only=True):
    """One part of a sandbox's network policy, and where it comes from."""

    source: str
    """`installation`, `team`, `template` or `sandbox`."""
    internet: str | UnsetType = UNSET
    allow_internet_access: bool | UnsetType = UNSET
    allow_private_networks: bool | UnsetType = UNSET
    network: NetworkConfig | UnsetType = UNSET
    exceeds_template: bool | UnsetType = UNSET
    """Whether an operator allowed it to exceed the template."""
    ingress_bandwidth: int | UnsetType = UNSET
    """Network traffic to the sandbox in bits per second; unset: no limit of this part."""
    egress_bandwidth: int | UnsetType = UNSET
    """Network traffic of the sandbox in bits per second; unset: no limit of this part."""


class NetworkView(E2BResponse, frozen=True, kw_only=True):
    """The network policy in effect: the intersection of its parts."""

    allow_internet_access: bool
    allow_private_networks: bool
    network: NetworkConfig
    ingress_bandwidth: int | UnsetType = UNSET
    """Network traffic to the sandbox in bits per second. 0: no limit. Unset on a cluster."""
    egress_bandwidth: int | UnsetType = UNSET
    """Network traffic of the sandbox in bits per second. 0: no limit. Unset on a cluster."""
    parts: tuple[NetworkPartView, ...]


class VolumeMount(E2BBody, frozen=True, kw_only=True):
    """A volume mounted in the sandbox."""

    name: str
    path: str


class CreateBody(E2BBody, frozen=True, kw_only=True):
    """`POST /v2/sandboxes` and `POST /sandboxes`."""

    template_id: str = field(name="templateID")
    timeout: Seconds | None = None
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: AutoResume | None = None
    allow_internet_access: bool | None = field(default=None, name="allow_internet_access")
    network: NetworkConfig | None = None
    metadata: Mapping[str, str] | None = None
    env_vars: Mapping[str, str] | None = None
    volume_mounts: tuple[VolumeMount, ...] | None = None
    secure: bool | None = None
    mcp: Mapping[str, Any] | None = None
    iam: Mapping[str, Any] | None = None


class ConnectBody(E2BBody, frozen=True, kw_only=True):
    """`POST …/connect`."""

    timeout: Seconds | None = None
    memory: bool | None = None


class ResumeBody(E2BBody, frozen=True, kw_only=True):
    """`POST …/resume`."""

    timeout: Seconds | None = None
    auto_pause: bool | None = None
    memory: bool | None = None


class PauseBody(E2BBody, frozen=True, kw_only=True):
    """`POST …/pause`."""

    memory: bool | None = None
    require_healthy_guest: bool | None = None


class TimeoutBody(E2BBody, frozen=True, kw_only=True):
    """`POST …/timeout`."""

    timeout: Seconds


class RefreshBody(E2BBody, frozen=True, kw_only=True):
    """`POST …/refreshes`."""

    duration: Annotated[int, Meta(ge=0, le=3600)] | None = None


class SnapshotBody(E2BBody, frozen=True, kw_only=True):
    """`POST …/snapshots`."""

    name: str | None = None
    memory: bool | None = None


class ForkBody(E2BBody, frozen=True, kw_only=True):
    """`POST …/fork`."""

    timeout: Seconds | None = None
    count: Annotated[int, Meta(ge=1, le=100)] = 1


class SandboxBody(E2BBody, frozen=True, kw_only=True):
    """The response of create, connect, resume and fork."""

    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    envd_version: str
    alias: str | UnsetType = UNSET
    envd_access_token: str | UnsetType = UNSET
    traffic_access_token: str | UnsetType | None = UNSET
    domain: str | UnsetType | None = UNSET


class LifecycleBody(E2BResponse, frozen=True, kw_only=True):
    """The action at the end of a sandbox's timeout."""

    auto_resume: bool
    on_timeout: str


class ListedSandbox(E2BResponse, frozen=True, kw_only=True):
    """A sandbox in a list."""

    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    state: str
    envd_version: str
    metadata: Mapping[str, str]
    alias: str | UnsetType = UNSET


class SandboxDetail(ListedSandbox, frozen=True, kw_only=True):
    """A sandbox with all fields."""

    envd_access_token: str | UnsetType = UNSET
    domain: str | UnsetType | None = UNSET
    allow_internet_access: bool | UnsetType = UNSET
    network: NetworkConfig | UnsetType = UNSET
    lifecycle: LifecycleBody | UnsetType = UNSET
    pause_mode: str | UnsetType = UNSET


class MetricBody(E2BResponse, frozen=True, kw_only=True):
    """Resource usage of a sandbox at one time."""

    timestamp: datetime
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


class SnapshotInfo(E2BResponse, frozen=True, kw_only=True):
    """A snapshot that sandboxes can be created from."""

    snapshot_id: str = field(name="snapshotID")
    names: tuple[str, ...] = ()


class ErrorBody(E2BResponse, frozen=True, kw_only=True):
    """An error; `code` repeats the HTTP status, because clients read it from the body."""

    code: int
    message: str
    request_id: str | UnsetType = field(default=UNSET, name="request_id")
    error_code: str | UnsetType = field(default=UNSET, name="error_code")
