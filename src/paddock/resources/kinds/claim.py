"""SandboxClaim: a declarative request for N sandboxes."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.meta import Condition, Resource, ResourcePart


class ClaimPhase(StrEnum):
    """Phase of a claim. Completed and Failed are final, as for a Job."""

    CLAIMING = "Claiming"
    COMPLETED = "Completed"
    """All requested sandboxes were ready."""
    FAILED = "Failed"
    """The claim ended with fewer sandboxes than requested."""

    @property
    def is_final(self) -> bool:
        """Whether the claim has ended."""
        return self is not ClaimPhase.CLAIMING


class UpdatedResources(ResourcePart, frozen=True, kw_only=True):
    """Resources of claimed sandboxes. Unset fields keep the value of the template."""

    cpu: str | None = None
    """CPU cores, such as `500m`. At most the value of the template."""
    memory: str | None = None
    """Memory in bytes, such as `512Mi`. At most the value of the template, or the limit that the
    operator sets for claims."""


class InplaceUpdate(ResourcePart, frozen=True, kw_only=True):
    """Differences between claimed sandboxes and their template.

    Warm sandboxes are updated in place if the runtime supports it. Otherwise new sandboxes are
    created.
    """

    image: str | None = None
    """Image that replaces the image of the template. The operator must allow it for claims."""
    resources: UpdatedResources | None = None
    """Resources that replace those of the template."""


class SandboxClaimSpec(ResourcePart, frozen=True, kw_only=True):
    """Desired sandboxes of a claim."""

    template_name: str
    """Name of a pool, an environment or a template, looked up in this order. Immutable."""
    replicas: int = 1
    """Number of sandboxes to claim. Defaults to 1. Immutable."""
    shutdown_time: datetime | None = None
    """Time at which the sandboxes shut down. If unset, they have no deadline."""
    claim_timeout_seconds: int = 60
    """Number of seconds after which the claim ends. Sandboxes that are not ready by then are
    abandoned. Defaults to 60."""
    wait_ready_timeout_seconds: int = 30
    """Number of seconds that each sandbox may take to become ready. After that it is abandoned and
    another one is tried. Defaults to 30."""
    inplace_update: InplaceUpdate | None = None
    """Differences between the claimed sandboxes and their template. Immutable."""
    ttl_seconds_after_completed: int = 3600
    """Number of seconds after its end at which the claim is deleted. A negative value means never.
    Defaults to 3600."""
    labels: Mapping[str, str] = EMPTY
    """Labels added to every sandbox."""
    annotations: Mapping[str, str] = EMPTY
    """Annotations added to every sandbox."""
    env_vars: Mapping[str, str] = EMPTY
    """Environment variables of every process in the sandboxes."""
    create_on_no_stock: bool = True
    """Whether to create sandboxes if the pool has no warm ones. Defaults to true."""
    reserve_failed_sandbox: bool = False
    """Whether to keep sandboxes that did not become ready, for debugging. They are labeled
    `paddock.dev/given-up`."""
    priority: int = 0
    """Scheduling priority. Claims with a higher value are served first."""

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations", "env_vars")


class ClaimedSandbox(ResourcePart, frozen=True, kw_only=True):
    """A sandbox that was claimed."""

    name: str
    """Name of the Sandbox object."""
    sandbox_id: str
    """Public id of the sandbox, used by clients."""


class SandboxClaimStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a claim."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    phase: ClaimPhase = ClaimPhase.CLAIMING
    """Phase of the claim: Claiming, then Completed or Failed."""
    message: str = ""
    """Human-readable details about the phase."""
    claimed_replicas: int = 0
    """Number of claimed sandboxes that became ready."""
    failures: int = 0
    """Number of consecutive sandboxes that were abandoned because they failed or were not ready in
    time."""
    backoff_until: datetime | None = None
    """Time before which no other sandbox is tried, after failures."""
    sandboxes: tuple[ClaimedSandbox, ...] = ()
    """The claimed sandboxes."""
    claim_start_time: datetime | None = None
    """Time at which claiming started."""
    completion_time: datetime | None = None
    """Time at which the claim was completed or failed."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the claim, such as Completed or Failed."""


class SandboxClaim(Resource, frozen=True, kw_only=True):
    """A request for sandboxes from a pool, an environment or a template."""

    KIND: ClassVar[str] = "SandboxClaim"
    PLURAL: ClassVar[str] = "sandboxclaims"

    spec: SandboxClaimSpec = SandboxClaimSpec(template_name="")
    status: SandboxClaimStatus = SandboxClaimStatus()
