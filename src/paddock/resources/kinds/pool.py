"""SandboxPool: warm sandboxes of one template."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.kinds.template import SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import Condition, Resource, ResourcePart

FINALIZER_POOL = "paddock.dev/pool"
"""Until what batches hold of it is theirs alone."""


class RecycleType(StrEnum):
    """What happens to a sandbox that is given back."""

    DELETE = "Delete"
    RESTART = "Restart"
    NOOP = "Noop"


class Capacity(ResourcePart, frozen=True, kw_only=True):
    """Bands: how many idle ones, how many in all."""

    buffer_min: int
    """At least so many are kept idle."""
    buffer_max: int
    """At most so many are kept idle."""
    pool_min: int = 0
    """At least so many in all, claimed ones included."""
    pool_max: int
    """At most so many in all, claimed ones included."""


class ScaleStrategy(ResourcePart, frozen=True, kw_only=True):
    """How fast a pool grows."""

    max_unavailable: int | str | None = None
    """How many may be in the making at once: a number or a percentage of what is wanted."""


class UpdateStrategy(ResourcePart, frozen=True, kw_only=True):
    """How a pool follows a changed template."""

    max_unavailable: int | str = "20%"
    """How many idle ones may be missing at once: a number or a percentage."""
    paused: bool = False
    """On: a changed template is not followed."""


class RecycleStrategy(ResourcePart, frozen=True, kw_only=True):
    """What happens to a sandbox that is given back."""

    type: RecycleType = RecycleType.DELETE
    """Delete it, restart it from its image, or give it out as it is."""
    max_recycles: int = 10
    """After so many it is deleted anyway."""
    timeout_seconds: int = 60
    """A reset that takes longer has failed."""


class SandboxPoolSpec(ResourcePart, frozen=True, kw_only=True):
    """How many warm sandboxes, of what, and how they are kept."""

    template: SandboxTemplateSpec | None = None
    """What its sandboxes are made of, written in place."""
    template_ref: TemplateRef | None = None
    """Exactly one of `template` and `templateRef`."""
    replicas: int | None = None
    """Unused sandboxes to keep; short for bufferMin = bufferMax. Exclusive with `capacity`."""
    capacity: Capacity | None = None
    """How many idle and how many in all. Exclusive with `replicas`."""
    scale_strategy: ScaleStrategy = ScaleStrategy()
    """How fast it grows."""
    update_strategy: UpdateStrategy = UpdateStrategy()
    """How it follows a changed template."""
    recycle_strategy: RecycleStrategy = RecycleStrategy()
    """What happens to a sandbox that is given back."""
    max_idle_age_seconds: int | None = None
    """Idle sandboxes older than this are replaced."""
    labels: Mapping[str, str] = EMPTY
    """Put on every sandbox of the pool."""
    annotations: Mapping[str, str] = EMPTY
    """Put on every sandbox of the pool."""
    algorithm: str = "packed"
    """How batches are served: `packed` or `spread`."""
    eviction_handler: str = "default"
    """Who decides what becomes of evicted sandboxes."""
    paused: bool = False
    """Neither grows nor shrinks."""

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations")


class AutoscalingState(ResourcePart, frozen=True, kw_only=True):
    """What the autoscaler must not forget over a restart."""

    last_scale_up_time: datetime | None = None
    """When it last grew."""
    last_scale_down_time: datetime | None = None
    """When it last shrank."""
    idle_zero_since: datetime | None = None
    """Since when none is idle."""
    last_attempt_time: datetime | None = None
    """When growing was last tried."""
    last_attempt_result: str = ""
    """What came of it."""
    saturated_until: datetime | None = None
    """Until then growing is not tried again."""
    last_claim_time: datetime | None = None
    """When one was last claimed."""
    claim_rate: float = 0.0
    """Claims per second of late; older ones count less."""
    claim_rate_time: datetime | None = None
    """When that was reckoned."""
    drain_since: datetime | None = None
    """Since when it is about to shrink; a claim calls that off."""
    drain_target: int | None = None
    """What it is about to shrink to."""
    message: str = ""
    """One sentence: what was decided last, and why."""
    observed_generation: int = 0
    """The generation that this state is about."""


class SandboxPoolStatus(ResourcePart, frozen=True, kw_only=True):
    """What is."""

    observed_generation: int = 0
    """The generation that this status is about."""
    replicas: int = 0
    """Unused sandboxes: creating and available."""
    available: int = 0
    """Idle and ready to be claimed."""
    creating: int = 0
    """In the making."""
    allocated: int = 0
    """Sandboxes of this pool in somebody's hands."""
    total: int = 0
    """All of its sandboxes."""
    desired: int = 0
    """How many it should have now, those in use included."""
    pending_requests: int = 0
    """Claims that wait for one."""
    revision: str = ""
    """Of the template that is current."""
    updated: int = 0
    """Idle ones of the current revision."""
    updated_available: int = 0
    """Of these, ready to be claimed."""
    failures: int = 0
    """Failed starts in a row; the pool backs off with them."""
    backoff_until: datetime | None = None
    """No new one is tried before."""
    selector: str = ""
    """Labels of its sandboxes, for the scale subresource."""
    autoscaling: AutoscalingState | None = None
    """Present where an autoscaler looks after it."""
    conditions: tuple[Condition, ...] = ()
    """Available, Degraded and so on."""


class SandboxPool(Resource, frozen=True, kw_only=True):
    """Warm sandboxes of one template."""

    KIND: ClassVar[str] = "SandboxPool"
    PLURAL: ClassVar[str] = "sandboxpools"

    spec: SandboxPoolSpec = SandboxPoolSpec()
    status: SandboxPoolStatus = SandboxPoolStatus()
