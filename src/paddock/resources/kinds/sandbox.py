"""Sandbox: one sandbox and its lifecycle.

Phases are what the controller records. `paddock.cache.states` computes the states that APIs and
routes show from phase, flags and deadlines.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from msgspec import structs

from paddock.resources.frozen import EMPTY, FrozenDict, freeze_flat
from paddock.resources.kinds.template import (
    NetworkPolicy,
    PauseStrategy,
    Resources,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import Condition, Resource, ResourcePart

LABEL_POOL = "paddock.dev/pool"
LABEL_TEMPLATE = "paddock.dev/template"
LABEL_REVISION = "paddock.dev/revision"
LABEL_CLAIMED = "paddock.dev/claimed"
LABEL_CLAIM = "paddock.dev/claim"
LABEL_BATCH = "paddock.dev/batch"
LABEL_SHARD = "paddock.dev/shard"
LABEL_EVICT = "paddock.dev/evict"
LABEL_GIVEN_UP = "paddock.dev/given-up"
"""On a sandbox that a claim abandoned and keeps for debugging (`reserveFailedSandbox`)."""
LABEL_TEAM = "paddock.dev/team"
ANNOTATION_AFTER_FAILURES = "paddock.dev/after-failures"
"""On a sandbox that a pool creates: the number of consecutive failed starts before it, if any."""
FINALIZER_SANDBOX = "paddock.dev/sandbox"

CONDITION_READY = "Ready"
CONDITION_PAUSED = "Paused"
CONDITION_HEALTHY = "Healthy"
CONDITION_STORABLE = "Storable"
"""False after an attempt to hibernate failed, until one succeeds."""
CONDITION_IMAGE = "ImagePulled"
"""False while the image of the sandbox is being pulled, or cannot be."""
REASON_PULL_FAILED = "ErrImagePull"
"""Reason of that condition after a failed attempt, until the next one."""
CONDITION_LIMITED = "LimitsEnforced"
"""False if its machine enforces a limit of its template only in part."""


class Phase(StrEnum):
    """Phase of a sandbox."""

    PENDING = "Pending"
    RUNNING = "Running"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    RESUMING = "Resuming"
    RECYCLING = "Recycling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    TERMINATING = "Terminating"


class WakeOnTraffic(ResourcePart, frozen=True, kw_only=True):
    """Whether a request to a paused sandbox resumes it."""

    enabled: bool = False
    """Whether requests resume the sandbox. If false, requests to a paused sandbox are refused.
    Defaults to false."""
    timeout_seconds: int = 300
    """Number of seconds that the resumed sandbox runs until its next auto-pause. Defaults to 300.
    """


class IdlePause(ResourcePart, frozen=True, kw_only=True):
    """Pauses a sandbox that has no requests and almost no CPU usage for some time."""

    after_seconds: int
    """Number of seconds that the sandbox must be idle."""
    cpu_percent_below: float = 5.0
    """CPU usage, in percent of one core, below which the sandbox is idle. Defaults to 5."""


class ClaimIdentity(ResourcePart, frozen=True, kw_only=True):
    """Identity and owner of a claimed sandbox. The claim sets all fields in one write."""

    sandbox_id: str
    """Public id of the sandbox. Must match `[a-z0-9]+`."""
    owner: str
    """Team that owns the sandbox."""
    lock: str
    """Random value that identifies this claim. It is the key of the quota ledger."""
    claim_time: datetime
    """Time at which the sandbox was claimed."""
    key_id: str = ""
    """Id of the API key that claimed the sandbox."""
    claim_uid: str = ""
    """UID of the SandboxClaim that claimed the sandbox. Protects against another claim with the
    same name."""
    template_id: str = ""
    """Template that the client requested."""
    access_token_hash: str = ""
    """SHA-256 of the envd access token. The token itself is derived and never stored."""
    traffic_token_hash: str = ""
    """SHA-256 of the token that requests to its ports need, if any."""
    account: str = ""
    """Process that claimed the sandbox, if several processes share a quota. The sandbox counts
    against the share of this process."""
    running_account: str = ""
    """Process whose share the running sandbox counts against, if another process resumed it."""
    network_opened: bool = False
    """Whether an operator allowed the network policy of the sandbox to exceed that of its
    template."""
    idempotency_key: str = ""
    """Idempotency key of the request. A repeated request returns the same sandbox."""
    idempotency_hash: str = ""
    """Hash of the request. The same key with a different request is a conflict."""
    metadata: Mapping[str, str] = EMPTY
    """Metadata set by the client."""
    env_vars: Mapping[str, str] = EMPTY
    """Environment variables of every process, merged over those of the template."""
    timeout_seconds: int | None = None
    """Timeout that the client requested, in seconds. If unset, there is no timeout."""
    auto_pause: bool = False
    """Whether the sandbox is paused instead of killed when its timeout ends."""
    auto_pause_memory: bool = True
    """Whether the auto-pause keeps memory. If false, it keeps only files. Defaults to true."""

    def __post_init__(self) -> None:
        # Not `freeze_fields`, for speed, as in `ObjectMeta`.
        if type(self.metadata) is not FrozenDict:
            structs.force_setattr(self, "metadata", freeze_flat(self.metadata))
        if type(self.env_vars) is not FrozenDict:
            structs.force_setattr(self, "env_vars", freeze_flat(self.env_vars))


class PauseDeadlines(ResourcePart, frozen=True, kw_only=True):
    """Deadlines that a sandbox had before it was paused, and when that was requested."""

    pause_time: datetime | None = None
    """`pauseTime` before the pause."""
    shutdown_time: datetime | None = None
    """`shutdownTime` before the pause."""
    requested_at: datetime | None = None
    """When the pause was requested."""


class SandboxSpec(ResourcePart, frozen=True, kw_only=True):
    """Desired state of a sandbox."""

    template: SandboxTemplateSpec | None = None
    """Template of the sandbox. Mutually exclusive with `templateRef`."""
    template_ref: TemplateRef | None = None
    """Reference to the template of the sandbox. Mutually exclusive with `template`."""
    restore_from: str | None = None
    """Id of a checkpoint. The sandbox starts from its state. Immutable once set."""
    restore_memory: bool = True
    """Whether it also starts from the memory of the checkpoint. If false, only from its files.
    Defaults to true."""
    paused: bool = False
    """Whether the sandbox should be paused."""
    pause_strategy: PauseStrategy | None = None
    """How the sandbox is paused. Defaults to the strategy of the template."""
    pause_time: datetime | None = None
    """Time at which the sandbox is paused."""
    shutdown_time: datetime | None = None
    """Time at which the sandbox shuts down. It is treated as dead from then on, and is deleted
    soon after."""
    paused_retention_seconds: int | None = None
    """Number of seconds that a paused sandbox is kept. If unset, it is kept indefinitely."""
    retained_until: datetime | None = None
    """Time at which the retention of the paused sandbox ends. A pause sets it together with
    `shutdownTime`; a resume removes both."""
    before_pause: PauseDeadlines | None = None
    """Deadlines that the sandbox had before it was paused. A pause records them; if it fails, they
    apply again. A resume removes them."""
    resumed_for_seconds: int | None = None
    """Number of seconds that the last resume granted. If resuming takes longer, the timeout counts
    from its end. Unset if the resume kept the deadline."""
    wake_on_traffic: WakeOnTraffic | None = None
    """Whether a request to the paused sandbox resumes it. If unset, it does not."""
    idle_pause: IdlePause | None = None
    """When the sandbox is paused because it is idle. If unset, it is not."""
    network: NetworkPolicy | None = None
    """Network policy. Defaults to the policy of the template, and allows no more than that."""
    resources: Resources | None = None
    """Resource limits. Defaults to those of the template."""
    image: str | None = None
    """Image of the sandbox. Defaults to the image of the template. A change replaces the image of a
    running sandbox in place, if the runtime supports it: processes and files start anew, volumes
    and the address stay."""
    claim: ClaimIdentity | None = None
    """Identity and owner of the sandbox. Unset while it waits in a pool."""
    recycle: bool = False
    """Whether the sandbox should be reset and returned to its pool."""


class SandboxAddress(ResourcePart, frozen=True, kw_only=True):
    """Network addresses of a sandbox."""

    ip: str | None = None
    """IP address in the network that gateways can reach."""
    envd: str | None = None
    """Address of envd in the sandbox."""
    node: str | None = None
    """Address of the node."""


class HibernationFailures(ResourcePart, frozen=True, kw_only=True):
    """Consecutive attempts to hibernate a sandbox that failed."""

    count: int
    """Number of attempts."""
    retry_time: datetime
    """Time before which there is no other attempt."""
    is_final: bool = False
    """Whether there is no other attempt until the sandbox is resumed."""
    message: str = ""
    """Reason of the last failure."""


class SandboxStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a sandbox."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    phase: Phase = Phase.PENDING
    """Phase of the sandbox."""
    message: str = ""
    """Human-readable reason for the phase."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the sandbox, such as Ready, Paused and Healthy."""
    runtime: str = ""
    """Name of the runtime that runs the sandbox."""
    node_name: str = ""
    """Name of the node that runs the sandbox."""
    address: SandboxAddress = SandboxAddress()
    """Network addresses of the sandbox."""
    incarnation: int = 0
    """Counter of process starts."""
    started_at: datetime | None = None
    """Time at which the processes last started."""
    paused_at: datetime | None = None
    """Time since which the sandbox is paused."""
    checkpoint_id: str | None = None
    """Id of the checkpoint that holds the memory of a hibernated sandbox."""
    pause_strategy: PauseStrategy | None = None
    """Strategy of the current pause."""
    stored_bytes: int = 0
    """Size of the memory of a hibernated sandbox on disk, in bytes. It counts for the quota
    `stored.bytes`."""
    hibernation_failures: HibernationFailures | None = None
    """Attempts to hibernate that failed since the last that succeeded."""
    resources: Resources = Resources()
    """Resource limits in effect."""
    image: str = ""
    """Image that the sandbox was started from."""
    image_digest: str = ""
    """Version of that image, as its registry names it."""
    recycled_count: int = 0
    """Number of times that the sandbox was recycled."""


class Sandbox(Resource, frozen=True, kw_only=True):
    """A sandbox."""

    KIND: ClassVar[str] = "Sandbox"
    PLURAL: ClassVar[str] = "sandboxes"

    spec: SandboxSpec = SandboxSpec()
    status: SandboxStatus = SandboxStatus()
