"""Sandbox: one sandbox and its life.

Phases are what the controller records; `paddock.cache.states` computes the states that APIs
and routes show from phase, flags and deadlines.
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
"""On what a claim could not hand over and was told to keep: somebody wants to look at it."""
LABEL_TEAM = "paddock.dev/team"
ANNOTATION_AFTER_FAILURES = "paddock.dev/after-failures"
"""On what a pool makes: after how many failed starts in a row it was tried, if there were any."""
FINALIZER_SANDBOX = "paddock.dev/sandbox"

CONDITION_READY = "Ready"
CONDITION_PAUSED = "Paused"
CONDITION_HEALTHY = "Healthy"


class Phase(StrEnum):
    """Where a sandbox is in its life."""

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
    """Whether a request to a paused sandbox wakes it."""

    enabled: bool = False
    """Off: requests to a paused sandbox are refused."""
    timeout_seconds: int = 300
    """How long it then lives until its next auto-pause."""


class IdlePause(ResourcePart, frozen=True, kw_only=True):
    """Pause when nothing happens: no request and next to no CPU for a while."""

    after_seconds: int
    """So long must nothing happen."""
    cpu_percent_below: float = 5.0
    """Of one core; more than this is not idle."""


class ClaimIdentity(ResourcePart, frozen=True, kw_only=True):
    """Whose sandbox this is; written once, together, by the claim."""

    sandbox_id: str
    """The public id, `[a-z0-9]+`."""
    owner: str
    """The team."""
    lock: str
    """Random; tells this claim from any other. The quota ledger's key."""
    claim_time: datetime
    """When it was claimed."""
    key_id: str = ""
    """The API key that claimed it."""
    claim_uid: str = ""
    """The SandboxClaim that got it: another of that name has no part in it."""
    template_id: str = ""
    """What the client asked for."""
    access_token_hash: str = ""
    """SHA-256 of envd's token; the token itself is derived, never stored."""
    traffic_token_hash: str = ""
    """SHA-256 of the token that requests to its ports need, if any."""
    account: str = ""
    """The process that claimed it, where several share a quota: it counts for that one's share."""
    running_account: str = ""
    """The process for whose share it runs, where another one resumed it."""
    idempotency_key: str = ""
    """By which the same request, sent twice, finds the same sandbox."""
    idempotency_hash: str = ""
    """What was asked with that key: the same key for something else is a conflict."""
    metadata: Mapping[str, str] = EMPTY
    """The client's own words."""
    env_vars: Mapping[str, str] = EMPTY
    """Variables of every process, over those of the template."""
    timeout_seconds: int | None = None
    """The timeout the client asked for; `None` is never."""
    auto_pause: bool = False
    """At its end it is paused, not killed."""
    auto_pause_memory: bool = True
    """Off: the auto-pause keeps files only."""

    def __post_init__(self) -> None:
        # Written out, as in `ObjectMeta`.
        if type(self.metadata) is not FrozenDict:
            structs.force_setattr(self, "metadata", freeze_flat(self.metadata))
        if type(self.env_vars) is not FrozenDict:
            structs.force_setattr(self, "env_vars", freeze_flat(self.env_vars))


class SandboxSpec(ResourcePart, frozen=True, kw_only=True):
    """What is wanted of a sandbox."""

    template: SandboxTemplateSpec | None = None
    """What it is made of, written in place."""
    template_ref: TemplateRef | None = None
    """Exactly one of `template` and `templateRef`."""
    restore_from: str | None = None
    """A checkpoint's id: start from that state."""
    paused: bool = False
    """Whether it is to be paused now."""
    pause_strategy: PauseStrategy | None = None
    """`None`: the template's."""
    pause_time: datetime | None = None
    """Paused at this instant."""
    shutdown_time: datetime | None = None
    """Dead from this instant; deleted soon after."""
    paused_retention_seconds: int | None = None
    """How long a paused one is kept; `None` is for ever."""
    wake_on_traffic: WakeOnTraffic | None = None
    """Whether a request wakes it; absent means no."""
    idle_pause: IdlePause | None = None
    """Whether it is paused when nothing happens; absent means no."""
    network: NetworkPolicy | None = None
    """`None`: the template's."""
    resources: Resources | None = None
    """`None`: the template's."""
    image: str | None = None
    """`None`: the template's. Changed of one that runs, it is replaced in place where that can be
    done: its processes and files start anew, its volumes and its address stay."""
    claim: ClaimIdentity | None = None
    """Whose it is; absent while it waits in a pool."""
    recycle: bool = False
    """Asked to go back to its pool."""


class SandboxAddress(ResourcePart, frozen=True, kw_only=True):
    """How a sandbox is reached."""

    ip: str | None = None
    """Inside the network that gateways reach."""
    envd: str | None = None
    """Where its daemon listens."""
    node: str | None = None
    """Where the machine it runs on is reached."""


class SandboxStatus(ResourcePart, frozen=True, kw_only=True):
    """What is."""

    observed_generation: int = 0
    """The generation that this status is about."""
    phase: Phase = Phase.PENDING
    """Where it is in its life."""
    message: str = ""
    """One sentence for people: why it is in this phase."""
    conditions: tuple[Condition, ...] = ()
    """Ready, Paused, Healthy and so on."""
    runtime: str = ""
    """The driver that keeps it."""
    node_name: str = ""
    """The machine it is on."""
    address: SandboxAddress = SandboxAddress()
    """How it is reached."""
    incarnation: int = 0
    """Grows with every start of its processes."""
    started_at: datetime | None = None
    """When its processes started last."""
    paused_at: datetime | None = None
    """Since when it is paused."""
    checkpoint_id: str | None = None
    """Where a hibernated sandbox's memory is."""
    pause_strategy: PauseStrategy | None = None
    """How it is paused now."""
    resources: Resources = Resources()
    """What it really has."""
    image: str = ""
    """What it was really started from."""
    recycled_count: int = 0
    """How often it went back to its pool."""


class Sandbox(Resource, frozen=True, kw_only=True):
    """One sandbox."""

    KIND: ClassVar[str] = "Sandbox"
    PLURAL: ClassVar[str] = "sandboxes"

    spec: SandboxSpec = SandboxSpec()
    status: SandboxStatus = SandboxStatus()
