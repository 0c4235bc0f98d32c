"""SandboxEnv: one environment served by several pools, perhaps in several clusters."""

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
    """How boldly a pool grows and shrinks."""

    CONSERVATIVE = "Conservative"
    DEFAULT = "Default"
    AGGRESSIVE = "Aggressive"


class EnvMode(StrEnum):
    """How an environment serves claims."""

    WARM_POOL = "WarmPool"


class EnvDefaults(ResourcePart, frozen=True, kw_only=True):
    """The shape of members that name none."""

    instance_type: str | None = None
    """The name of a shape."""
    multiplier: int = 1
    """How many times that shape."""


class MemberConfig(ResourcePart, frozen=True, kw_only=True):
    """How one member scales and is preferred."""

    labels: Mapping[str, str] = EMPTY
    """Of the sandboxes."""
    annotations: Mapping[str, str] = EMPTY
    """Of the sandboxes."""
    instance_type: str | None = None
    """The name of a shape."""
    multiplier: int | None = None
    """How many times that shape."""
    inline_resources: Resources | None = None
    """The shape, written in place."""
    scaling_group: str = "default"
    """The group it scales with."""
    min_replicas: int = 0
    """It never shrinks below this."""
    max_replicas: int | None = None
    """It never grows above this; absent means without bound."""
    priority: int = 0
    """Lower is tried first."""
    scale_up_priority: int = 0
    """Lower grows first."""
    scale_down_priority: int = 0
    """Higher shrinks first."""
    update_strategy: UpdateStrategy | None = None
    """How it follows a changed template."""

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations")


class MemberMetadata(ResourcePart, frozen=True, kw_only=True):
    """Put on the member's pool."""

    labels: Mapping[str, str] = EMPTY
    annotations: Mapping[str, str] = EMPTY

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations")


class EnvMember(ResourcePart, frozen=True, kw_only=True):
    """One pool of one cluster."""

    metadata: MemberMetadata = MemberMetadata()
    """Of the member's pool."""
    spec: SandboxPoolSpec | None = None
    """The pool's spec as admitted; rendered from the template where absent."""
    replicas: int | None = None
    """Total sandboxes wanted; the autoscaler writes it."""
    config: MemberConfig = MemberConfig()
    """How it scales and is preferred."""


class EnvCluster(ResourcePart, frozen=True, kw_only=True):
    """The members of one cluster."""

    members: Mapping[str, EnvMember] = EMPTY
    """Pools by name."""

    def __post_init__(self) -> None:
        freeze_fields(self, "members")


class ScheduledFloor(ResourcePart, frozen=True, kw_only=True):
    """A minimum that holds in a window of time."""

    cron: str
    """When the window opens, five fields, UTC."""
    duration_seconds: int
    """How long the window stays open."""
    min_replicas: int
    """At least so many while it is open."""


class Forecast(ResourcePart, frozen=True, kw_only=True):
    """A floor from the recent rate of claims."""

    enabled: bool = False
    """Whether recent claims set a floor."""
    window_seconds: int = 600
    """How far back claims are counted."""
    lead_seconds: int = 30
    """How far ahead sandboxes must be ready."""


class ScalingGroup(ResourcePart, frozen=True, kw_only=True):
    """Members that scale together."""

    enabled: bool = True
    """Off: nothing in the group is scaled."""
    min_replicas: int = 0
    """At least so many in the group."""
    max_replicas: int | None = None
    """At most so many in the group. Needed where growing is Aggressive."""
    scale_up_policy: ScalePolicy = ScalePolicy.DEFAULT
    """How boldly it grows."""
    scale_down_policy: ScalePolicy = ScalePolicy.DEFAULT
    """How boldly it shrinks."""
    cooldown_seconds: int = 30
    """Between two changes."""
    saturation_cooldown_seconds: int = 60
    """After growing was refused."""
    idle_threshold_seconds: int = 30
    """A sandbox unused for so long is idle."""
    idle_zero_quiet_window_seconds: int = 300
    """Without claims for so long, a group may shrink to its minimum."""
    stabilization_seconds: int = 60
    """A lower demand must last so long to count."""
    idle_timeout_seconds: int = 300
    """Idle sandboxes beyond the buffer end after this."""
    schedules: tuple[ScheduledFloor, ...] = ()
    """Minimums that hold at certain times."""
    forecast: Forecast = Forecast()
    """A minimum from the recent rate of claims."""


class Autoscaling(ResourcePart, frozen=True, kw_only=True):
    """Scaling groups by name."""

    groups: Mapping[str, ScalingGroup] = EMPTY
    """How each group scales."""

    def __post_init__(self) -> None:
        freeze_fields(self, "groups")


class EnvOverrides(ResourcePart, frozen=True, kw_only=True):
    """What every member has otherwise than the template."""

    image: str | None = None
    """Instead of the template's."""
    env: Mapping[str, str] = EMPTY
    """Over the template's."""
    network_policy: NetworkPolicy | None = None
    """Instead of the template's."""
    default_startup_timeout_seconds: int | None = None
    """How long a sandbox may take to be ready."""
    default_idle_timeout_seconds: int | None = None
    """How long an unused one is kept."""
    update_strategy: UpdateStrategy | None = None
    """Of every member that has none."""

    def __post_init__(self) -> None:
        freeze_fields(self, "env")


class SandboxEnvSpec(ResourcePart, frozen=True, kw_only=True):
    """Which pools in which clusters serve this environment, and how large they may be."""

    template_ref: TemplateRef
    """What its sandboxes are made of."""
    mode: EnvMode = EnvMode.WARM_POOL
    """How claims are served."""
    defaults: EnvDefaults = EnvDefaults()
    """The shape of members that name none."""
    clusters: Mapping[str, EnvCluster] = EMPTY
    """Members by cluster; each cluster looks at its own entry only."""
    autoscaling: Autoscaling = Autoscaling()
    """How members grow and shrink."""
    overrides: EnvOverrides = EnvOverrides()
    """What every member has otherwise than the template."""

    def __post_init__(self) -> None:
        freeze_fields(self, "clusters")


class MemberState(StrEnum):
    """How a member is."""

    ACTIVE = "Active"
    SATURATED = "Saturated"
    MISSING = "Missing"
    INCONSISTENT = "Inconsistent"


class ObservedMember(ResourcePart, frozen=True, kw_only=True):
    """What is known of one member."""

    name: str
    pool: str = ""
    """The pool that serves it."""
    state: MemberState = MemberState.MISSING
    """How it is."""
    idle: int = 0
    """Ready to be claimed."""
    running: int = 0
    """In use."""
    pending: int = 0
    """In the making."""
    desired: int = 0
    """Wanted in all."""
    current: int = 0
    """There in all."""
    saturated_until: datetime | None = None
    """Until then it is not asked to grow."""
    scale_up_headroom: int | None = None
    """How many more it may have; `None` is without bound."""
    scaling_group: str = "default"
    """The group it scales with."""
    autoscaling_enabled: bool = False
    """Whether it is scaled at all."""
    priority: int = 0
    """Lower is tried first."""
    effective_resources: Resources = Resources()
    """What each of its sandboxes may use, whoever said so."""
    revision: str = ""
    """Of its template."""
    updated: int = 0
    """Sandboxes of that revision."""
    message: str = ""
    """One sentence for people."""


class ObservedCluster(ResourcePart, frozen=True, kw_only=True):
    """What is known of one cluster's members."""

    cluster_id: str
    is_local: bool = False
    last_snapshot_time: datetime | None = None
    observed_members: tuple[ObservedMember, ...] = ()


class ObservedGroup(ResourcePart, frozen=True, kw_only=True):
    """Totals of one scaling group."""

    name: str
    total_idle: int = 0
    total_running: int = 0
    total_desired: int = 0


class ObservedQueue(ResourcePart, frozen=True, kw_only=True):
    """Claims that wait in one process that answers clients."""

    name: str
    """Of the process."""
    waiting: int = 0
    """Content with any group."""
    pinned: Mapping[str, int] = EMPTY
    """By the scaling group they insist on."""
    time: datetime | None = None
    """When it said so; an old word counts for nothing."""

    def __post_init__(self) -> None:
        freeze_fields(self, "pinned")


class SandboxEnvStatus(ResourcePart, frozen=True, kw_only=True):
    """What is."""

    observed_generation: int = 0
    """The generation that this status is about."""
    member_count: int = 0
    """In all clusters."""
    desired: int = 0
    """Sandboxes wanted in all."""
    running: int = 0
    """Sandboxes in use."""
    idle: int = 0
    """Sandboxes ready to be claimed."""
    waiting: int = 0
    """Claims that wait for one, in this cluster."""
    queues: tuple[ObservedQueue, ...] = ()
    """What processes say that answer clients apart from the controllers."""
    clusters: tuple[ObservedCluster, ...] = ()
    """What is known of each cluster's members."""
    scaling_groups: tuple[ObservedGroup, ...] = ()
    """Totals by group."""
    conditions: tuple[Condition, ...] = ()
    """Ready, TemplateConsistent, AutoscalingActive."""


class SandboxEnv(Resource, frozen=True, kw_only=True):
    """One environment served by several pools."""

    KIND: ClassVar[str] = "SandboxEnv"
    PLURAL: ClassVar[str] = "sandboxenvs"

    spec: SandboxEnvSpec = SandboxEnvSpec(template_ref=TemplateRef(name=""))
    status: SandboxEnvStatus = SandboxEnvStatus()
