"""SandboxEnv: one environment served by several pools, in one or more clusters."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.kinds.pool import SandboxPoolSpec, UpdateStrategy
from paddock.resources.kinds.template import NetworkPolicy, Resources, TemplateRef
from paddock.resources.meta import Condition, Resource, ResourcePart

LABEL_ENV = "paddock.dev/env"
LABEL_MEMBER = "paddock.dev/member"
LABEL_GROUP = "paddock.dev/scaling-group"


class ScalePolicy(StrEnum):
    """How fast a pool grows or shrinks."""

    CONSERVATIVE = "Conservative"
    DEFAULT = "Default"
    AGGRESSIVE = "Aggressive"


class EnvMode(StrEnum):
    """How an environment serves claims."""

    WARM_POOL = "WarmPool"


class EnvDefaults(ResourcePart, frozen=True, kw_only=True):
    """Resources of members that specify none."""

    instance_type: str | None = None
    """Name of an instance type."""
    multiplier: int = 1
    """Multiple of the instance type. Defaults to 1."""


class MemberConfig(ResourcePart, frozen=True, kw_only=True):
    """Scaling and priority of one member."""

    labels: Mapping[str, str] = EMPTY
    """Labels of the sandboxes."""
    annotations: Mapping[str, str] = EMPTY
    """Annotations of the sandboxes."""
    instance_type: str | None = None
    """Name of an instance type."""
    multiplier: int | None = None
    """Multiple of the instance type."""
    inline_resources: Resources | None = None
    """Resources of the sandboxes. Mutually exclusive with `instanceType`."""
    scaling_group: str = "default"
    """Name of the scaling group of this member. Defaults to `default`."""
    min_replicas: int = 0
    """Lower limit of the number of sandboxes."""
    max_replicas: int | None = None
    """Upper limit of the number of sandboxes. If unset, there is no limit."""
    priority: int = 0
    """Order in which members serve claims. Lower values are tried first."""
    scale_up_priority: int = 0
    """Order in which members grow. Lower values grow first."""
    scale_down_priority: int = 0
    """Order in which members shrink. Higher values shrink first."""
    update_strategy: UpdateStrategy | None = None
    """How the member follows changes of the template."""

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations")


class MemberMetadata(ResourcePart, frozen=True, kw_only=True):
    """Metadata of the pool of a member."""

    labels: Mapping[str, str] = EMPTY
    """Labels of the pool."""
    annotations: Mapping[str, str] = EMPTY
    """Annotations of the pool."""

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations")


class EnvMember(ResourcePart, frozen=True, kw_only=True):
    """One pool in one cluster."""

    metadata: MemberMetadata = MemberMetadata()
    """Metadata of the pool."""
    spec: SandboxPoolSpec | None = None
    """Spec of the pool, as admitted. If unset, it is rendered from the template."""
    replicas: int | None = None
    """Desired total number of sandboxes. Set by the autoscaler."""
    config: MemberConfig = MemberConfig()
    """Scaling and priority of the member."""


class EnvCluster(ResourcePart, frozen=True, kw_only=True):
    """Members of one cluster."""

    members: Mapping[str, EnvMember] = EMPTY
    """Members by name."""

    def __post_init__(self) -> None:
        freeze_fields(self, "members")


class ScheduledFloor(ResourcePart, frozen=True, kw_only=True):
    """A minimum number of sandboxes during a time window."""

    cron: str
    """Start of the window, as a cron expression with five fields in UTC."""
    duration_seconds: int
    """Length of the window in seconds."""
    min_replicas: int
    """Minimum number of sandboxes during the window."""


class Forecast(ResourcePart, frozen=True, kw_only=True):
    """A minimum number of sandboxes derived from the recent rate of claims."""

    enabled: bool = False
    """Whether the recent rate of claims sets a minimum. Defaults to false."""
    window_seconds: int = 600
    """Length of the period in which claims are counted, in seconds. Defaults to 600."""
    lead_seconds: int = 30
    """How far ahead of the expected claims sandboxes must be ready, in seconds. Defaults to 30."""


class ScalingGroup(ResourcePart, frozen=True, kw_only=True):
    """Members that scale together."""

    enabled: bool = True
    """Whether members of the group are scaled. Defaults to true."""
    min_replicas: int = 0
    """Minimum number of sandboxes in the group."""
    max_replicas: int | None = None
    """Maximum number of sandboxes in the group. Required if `scaleUpPolicy` is Aggressive."""
    scale_up_policy: ScalePolicy = ScalePolicy.DEFAULT
    """How fast the group grows."""
    scale_down_policy: ScalePolicy = ScalePolicy.DEFAULT
    """How fast the group shrinks."""
    cooldown_seconds: int = 30
    """Minimum number of seconds between two changes. Defaults to 30."""
    saturation_cooldown_seconds: int = 60
    """Number of seconds to wait after scaling up was refused. Defaults to 60."""
    idle_threshold_seconds: int = 30
    """Number of seconds after which an unused sandbox counts as idle. Defaults to 30."""
    idle_zero_quiet_window_seconds: int = 300
    """Number of seconds without claims after which the group may shrink to its minimum. Defaults to
    300."""
    stabilization_seconds: int = 60
    """Number of seconds that a lower demand must last before the group shrinks. Defaults to 60."""
    idle_timeout_seconds: int = 300
    """Number of seconds after which idle sandboxes beyond the buffer are deleted. Defaults to 300.
    """
    schedules: tuple[ScheduledFloor, ...] = ()
    """Minimum numbers of sandboxes during time windows."""
    forecast: Forecast = Forecast()
    """A minimum number of sandboxes derived from the recent rate of claims."""


class Autoscaling(ResourcePart, frozen=True, kw_only=True):
    """Scaling groups by name."""

    groups: Mapping[str, ScalingGroup] = EMPTY
    """Scaling groups by name."""

    def __post_init__(self) -> None:
        freeze_fields(self, "groups")


class EnvOverrides(ResourcePart, frozen=True, kw_only=True):
    """Differences between every member and the template."""

    image: str | None = None
    """Image that replaces the image of the template."""
    env: Mapping[str, str] = EMPTY
    """Environment variables, merged over those of the template."""
    network_policy: NetworkPolicy | None = None
    """Network policy that replaces the policy of the template."""
    default_startup_timeout_seconds: int | None = None
    """Number of seconds that a sandbox may take to become ready."""
    default_idle_timeout_seconds: int | None = None
    """Number of seconds that an unused sandbox is kept."""
    update_strategy: UpdateStrategy | None = None
    """Update strategy of members that specify none."""

    def __post_init__(self) -> None:
        freeze_fields(self, "env")


class SandboxEnvSpec(ResourcePart, frozen=True, kw_only=True):
    """Desired state of an environment."""

    template_ref: TemplateRef
    """Template of the sandboxes."""
    mode: EnvMode = EnvMode.WARM_POOL
    """How claims are served."""
    defaults: EnvDefaults = EnvDefaults()
    """Resources of members that specify none."""
    clusters: Mapping[str, EnvCluster] = EMPTY
    """Members by cluster. Each cluster uses only its own entry."""
    autoscaling: Autoscaling = Autoscaling()
    """How members grow and shrink."""
    overrides: EnvOverrides = EnvOverrides()
    """Differences between every member and the template."""

    def __post_init__(self) -> None:
        freeze_fields(self, "clusters")


class MemberState(StrEnum):
    """State of a member."""

    ACTIVE = "Active"
    SATURATED = "Saturated"
    MISSING = "Missing"
    INCONSISTENT = "Inconsistent"


class ObservedMember(ResourcePart, frozen=True, kw_only=True):
    """Observed state of one member."""

    name: str
    """Name of the member."""
    pool: str = ""
    """Name of the pool of the member."""
    state: MemberState = MemberState.MISSING
    """State of the member."""
    idle: int = 0
    """Number of sandboxes that are ready to be claimed."""
    running: int = 0
    """Number of sandboxes in use."""
    pending: int = 0
    """Number of sandboxes that are being created."""
    desired: int = 0
    """Desired total number of sandboxes."""
    current: int = 0
    """Current total number of sandboxes."""
    saturated_until: datetime | None = None
    """Time until which the member is not scaled up."""
    scale_up_headroom: int | None = None
    """Number of sandboxes that can still be added. If unset, there is no limit."""
    scaling_group: str = "default"
    """Name of the scaling group of the member."""
    autoscaling_enabled: bool = False
    """Whether the member is scaled automatically."""
    priority: int = 0
    """Order in which members serve claims. Lower values are tried first."""
    effective_resources: Resources = Resources()
    """Effective resources of each sandbox, from all sources."""
    revision: str = ""
    """Revision of the template."""
    updated: int = 0
    """Number of sandboxes of that revision."""
    message: str = ""
    """Human-readable details about the state."""


class ObservedCluster(ResourcePart, frozen=True, kw_only=True):
    """Observed state of the members of one cluster."""

    cluster_id: str
    """Id of the cluster."""
    is_local: bool = False
    """Whether it is the cluster of this object."""
    last_snapshot_time: datetime | None = None
    """Time of the last snapshot of the cluster."""
    observed_members: tuple[ObservedMember, ...] = ()
    """Observed state of each member."""


class ObservedGroup(ResourcePart, frozen=True, kw_only=True):
    """Totals of one scaling group."""

    name: str
    """Name of the scaling group."""
    total_idle: int = 0
    """Number of sandboxes that are ready to be claimed."""
    total_running: int = 0
    """Number of sandboxes in use."""
    total_desired: int = 0
    """Desired number of sandboxes."""


class ObservedQueue(ResourcePart, frozen=True, kw_only=True):
    """Claims that wait in one API process."""

    name: str
    """Name of the process."""
    waiting: int = 0
    """Number of claims that any group can serve."""
    pinned: Mapping[str, int] = EMPTY
    """Number of claims that require a certain scaling group, by group."""
    time: datetime | None = None
    """Time of the report. Outdated reports are ignored."""

    def __post_init__(self) -> None:
        freeze_fields(self, "pinned")


class SandboxEnvStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of an environment."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    member_count: int = 0
    """Number of members in all clusters."""
    desired: int = 0
    """Desired total number of sandboxes."""
    running: int = 0
    """Number of sandboxes in use."""
    idle: int = 0
    """Number of sandboxes that are ready to be claimed."""
    waiting: int = 0
    """Number of claims in this cluster that wait for a sandbox."""
    queues: tuple[ObservedQueue, ...] = ()
    """Queues of API processes that run separately from the controllers."""
    clusters: tuple[ObservedCluster, ...] = ()
    """Observed state of each cluster."""
    scaling_groups: tuple[ObservedGroup, ...] = ()
    """Totals of each scaling group."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the environment: Ready, TemplateConsistent, AutoscalingActive."""


class SandboxEnv(Resource, frozen=True, kw_only=True):
    """An environment served by several pools, in one or more clusters."""

    KIND: ClassVar[str] = "SandboxEnv"
    PLURAL: ClassVar[str] = "sandboxenvs"

    spec: SandboxEnvSpec = SandboxEnvSpec(template_ref=TemplateRef(name=""))
    status: SandboxEnvStatus = SandboxEnvStatus()
