"""SandboxClaim: give me N sandboxes, declaratively."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.meta import Condition, Resource, ResourcePart


class ClaimPhase(StrEnum):
    """Where a claim is. Completed is final, as a Job's is."""

    CLAIMING = "Claiming"
    COMPLETED = "Completed"


class UpdatedResources(ResourcePart, frozen=True, kw_only=True):
    """What a claimed sandbox may use instead; an unset one stays its template's."""

    cpu: str | None = None
    """Cores, such as `500m`; at most the template's."""
    memory: str | None = None
    """Bytes, such as `512Mi`; at most the template's, or what the operator lets claims have."""


class InplaceUpdate(ResourcePart, frozen=True, kw_only=True):
    """What claimed sandboxes have otherwise than their template.

    Warm ones are changed as they run where the runtime can do that; else others are made so.
    """

    image: str | None = None
    """Instead of the template's; one that the operator lets claims choose."""
    resources: UpdatedResources | None = None
    """Instead of the template's."""


class SandboxClaimSpec(ResourcePart, frozen=True, kw_only=True):
    """What is claimed, and on what terms."""

    template_name: str
    """A pool, an environment or a template, looked up in that order."""
    replicas: int = 1
    """Immutable."""
    shutdown_time: datetime | None = None
    """When the sandboxes end; absent means never."""
    claim_timeout_seconds: int = 60
    """How long the claim tries; what is not ready by then is given up."""
    wait_ready_timeout_seconds: int = 30
    """How long each sandbox may take to be ready; then it is given up and another is tried."""
    inplace_update: InplaceUpdate | None = None
    """What the sandboxes have otherwise than their template. Immutable."""
    ttl_seconds_after_completed: int = 3600
    """Negative: never deleted."""
    labels: Mapping[str, str] = EMPTY
    """Put on every sandbox."""
    annotations: Mapping[str, str] = EMPTY
    """Put on every sandbox."""
    env_vars: Mapping[str, str] = EMPTY
    """Variables of every process in them."""
    create_on_no_stock: bool = True
    """Make new ones where the pool has none."""
    reserve_failed_sandbox: bool = False
    """Keep sandboxes that failed to get ready, to look at them; they bear a label that says so."""
    priority: int = 0
    """Higher is served first."""

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations", "env_vars")


class ClaimedSandbox(ResourcePart, frozen=True, kw_only=True):
    """One sandbox that a claim got."""

    name: str
    """Of the Sandbox object."""
    sandbox_id: str
    """By which clients address it."""


class SandboxClaimStatus(ResourcePart, frozen=True, kw_only=True):
    """What is."""

    observed_generation: int = 0
    """The generation that this status is about."""
    phase: ClaimPhase = ClaimPhase.CLAIMING
    """Claiming, or Completed for good."""
    message: str = ""
    """One sentence for people."""
    claimed_replicas: int = 0
    """How many it has got that were ready."""
    failures: int = 0
    """So many in a row were given up, for they failed or were not ready in time."""
    backoff_until: datetime | None = None
    """After failures no other is tried before."""
    sandboxes: tuple[ClaimedSandbox, ...] = ()
    """Which ones it has got."""
    claim_start_time: datetime | None = None
    """When it began."""
    completion_time: datetime | None = None
    """When it was done."""
    conditions: tuple[Condition, ...] = ()
    """Completed and so on."""


class SandboxClaim(Resource, frozen=True, kw_only=True):
    """A claim of N sandboxes from a pool, environment or template."""

    KIND: ClassVar[str] = "SandboxClaim"
    PLURAL: ClassVar[str] = "sandboxclaims"

    spec: SandboxClaimSpec = SandboxClaimSpec(template_name="")
    status: SandboxClaimStatus = SandboxClaimStatus()
