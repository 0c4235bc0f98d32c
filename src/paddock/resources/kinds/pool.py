"""SandboxPool: warm sandboxes of one template."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.kinds.template import SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import Condition, Resource, ResourcePart

FINALIZER_POOL = "paddock.dev/pool"
"""Delays deletion of a pool until the sandboxes that batches hold are detached from it."""

CONDITION_DEGRADED = "Degraded"
"""Sandboxes of the pool do not start; the message states the last error."""


class RecycleType(StrEnum):
    """What happens to a released sandbox."""

    DELETE = "Delete"
    """The sandbox is deleted."""
    RESTART = "Restart"
    """The sandbox is restarted from its image and returned to the pool."""
    NOOP = "Noop"
    """The sandbox is returned to the pool as it is."""


class Capacity(ResourcePart, frozen=True, kw_only=True):
    """Limits of the number of idle sandboxes and of all sandboxes."""

    buffer_min: int
    """Minimum number of idle sandboxes."""
    buffer_max: int
    """Maximum number of idle sandboxes."""
    pool_min: int = 0
    """Minimum total number of sandboxes, including claimed ones."""
    pool_max: int
    """Maximum total number of sandboxes, including claimed ones."""


class ScaleStrategy(ResourcePart, frozen=True, kw_only=True):
    """How fast a pool grows."""

    max_unavailable: int | str | None = None
    """Maximum number of sandboxes that are created at once. A number or a percentage of the desired
    number."""


class UpdateStrategy(ResourcePart, frozen=True, kw_only=True):
    """How a pool follows changes of its template."""

    max_unavailable: int | str = "20%"
    """Maximum number of idle sandboxes that may be unavailable during an update. A number or a
    percentage. Defaults to 20%."""
    paused: bool = False
    """Whether updates are paused. If true, changes of the template are not rolled out."""


class RecycleStrategy(ResourcePart, frozen=True, kw_only=True):
    """What happens to a released sandbox."""

    type: RecycleType = RecycleType.DELETE
    """How a released sandbox is recycled. Defaults to Delete."""
    max_recycles: int = 10
    """Number of recycles after which a sandbox is deleted. Defaults to 10."""
    timeout_seconds: int = 60
    """Number of seconds after which a reset has failed. Defaults to 60."""


class SandboxPoolSpec(ResourcePart, frozen=True, kw_only=True):
    """Desired state of a pool."""

    template: SandboxTemplateSpec | None = None
    """Template of the sandboxes. Exactly one of `template` and `templateRef` is required."""
    template_ref: TemplateRef | None = None
    """Reference to the template of the sandboxes. Exactly one of `template` and `templateRef` is
    required."""
    replicas: int | None = None
    """Number of unused sandboxes to keep. Sets both bufferMin and bufferMax. Mutually exclusive
    with `capacity`."""
    capacity: Capacity | None = None
    """Limits of the number of idle sandboxes and of all sandboxes. Mutually exclusive with
    `replicas`."""
    scale_strategy: ScaleStrategy = ScaleStrategy()
    """How fast the pool grows."""
    update_strategy: UpdateStrategy = UpdateStrategy()
    """How the pool follows changes of its template."""
    recycle_strategy: RecycleStrategy = RecycleStrategy()
    """What happens to a released sandbox."""
    max_idle_age_seconds: int | None = None
    """Number of seconds after which an idle sandbox is replaced."""
    labels: Mapping[str, str] = EMPTY
    """Labels added to every sandbox of the pool."""
    annotations: Mapping[str, str] = EMPTY
    """Annotations added to every sandbox of the pool."""
    algorithm: str = "packed"
    """How sandboxes are assigned to batches: `packed` or `spread`. Defaults to `packed`."""
    eviction_handler: str = "default"
    """Name of the handler of evicted sandboxes."""
    paused: bool = False
    """Whether scaling is paused. If true, the pool neither grows nor shrinks."""

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations")


class AutoscalingState(ResourcePart, frozen=True, kw_only=True):
    """State of the autoscaler that must survive a restart."""

    last_scale_up_time: datetime | None = None
    """Time at which the pool last grew."""
    last_scale_down_time: datetime | None = None
    """Time at which the pool last shrank."""
    idle_zero_since: datetime | None = None
    """Time since which no sandbox is idle."""
    last_attempt_time: datetime | None = None
    """Time of the last attempt to grow."""
    last_attempt_result: str = ""
    """Result of the last attempt to grow."""
    saturated_until: datetime | None = None
    """Time until which the pool is not scaled up."""
    last_claim_time: datetime | None = None
    """Time at which a sandbox was last claimed."""
    claim_rate: float = 0.0
    """Recent rate of claims, in claims per second. Older claims have less weight."""
    claim_rate_time: datetime | None = None
    """Time at which the rate was computed."""
    drain_since: datetime | None = None
    """Time since which the pool is about to shrink. A claim cancels it."""
    drain_target: int | None = None
    """Number of sandboxes that the pool is about to shrink to."""
    message: str = ""
    """Human-readable reason for the last decision."""
    observed_generation: int = 0
    """The generation that this state reflects."""


class SandboxPoolStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a pool."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    replicas: int = 0
    """Number of unused sandboxes, both creating and available."""
    available: int = 0
    """Number of idle sandboxes that are ready to be claimed."""
    creating: int = 0
    """Number of sandboxes that are being created."""
    allocated: int = 0
    """Number of sandboxes in use."""
    total: int = 0
    """Total number of sandboxes."""
    desired: int = 0
    """Desired number of sandboxes, including those in use."""
    pending_requests: int = 0
    """Number of claims that wait for a sandbox."""
    revision: str = ""
    """Current revision of the template."""
    image: str = ""
    """Image that `imageDigest` belongs to, if the pool has a template of its own."""
    image_digest: str = ""
    """Version of that image that sandboxes of the pool start from."""
    updated: int = 0
    """Number of idle sandboxes of the current revision."""
    updated_available: int = 0
    """Number of idle sandboxes of the current revision that are ready to be claimed."""
    failures: int = 0
    """Number of consecutive failed starts. The backoff grows with it."""
    backoff_until: datetime | None = None
    """Time before which no sandbox is created, after failures."""
    selector: str = ""
    """Label selector of the sandboxes, for the scale subresource."""
    autoscaling: AutoscalingState | None = None
    """State of the autoscaler, if the pool is scaled automatically."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the pool, such as Available and Degraded."""


class SandboxPool(Resource, frozen=True, kw_only=True):
    """A pool of warm sandboxes of one template."""

    KIND: ClassVar[str] = "SandboxPool"
    PLURAL: ClassVar[str] = "sandboxpools"

    spec: SandboxPoolSpec = SandboxPoolSpec()
    status: SandboxPoolStatus = SandboxPoolStatus()
