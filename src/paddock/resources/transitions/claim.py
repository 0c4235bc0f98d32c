"""Claiming a sandbox: a pure change of the object, written by one compare-and-swap.

The pool's ownership is removed and the claim's identity is set in the same write, so a sandbox
belongs at every instant either to its pool or to exactly one claim.
"""

from collections.abc import Mapping
from datetime import datetime

from msgspec import structs

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.kinds.sandbox import (
    LABEL_BATCH,
    LABEL_CLAIM,
    LABEL_CLAIMED,
    LABEL_SHARD,
    LABEL_TEAM,
    ClaimIdentity,
    IdlePause,
    Sandbox,
    SandboxSpec,
    WakeOnTraffic,
)
from paddock.resources.kinds.template import (
    NetworkPolicy,
    PauseStrategy,
    Resources,
    SandboxTemplateSpec,
)
from paddock.resources.meta import ResourcePart, with_meta
from paddock.resources.transitions import deadlines

OURS = (LABEL_CLAIM, LABEL_BATCH, LABEL_SHARD)
"""Labels of a controller's claim that replace those of the sandbox."""


class Terms(ResourcePart, frozen=True, kw_only=True):
    """The terms of a claim."""

    identity: ClaimIdentity
    wake: WakeOnTraffic | None = None
    idle_pause: IdlePause | None = None
    network: NetworkPolicy | None = None
    traffic_token_hash: str = ""
    """SHA-256 of the token that requests need if the policy in effect is private."""
    resources: Resources | None = None
    image: str | None = None
    """The image instead of the template's; a running sandbox is started from it."""
    pause_strategy: PauseStrategy | None = None
    paused_retention_seconds: int | None = None
    shutdown_time: datetime | None = None
    """A fixed end instead of a timeout."""
    labels: Mapping[str, str] = EMPTY
    annotations: Mapping[str, str] = EMPTY

    def __post_init__(self) -> None:
        freeze_fields(self, "labels", "annotations")


class ClaimRequirements(ResourcePart, frozen=True, kw_only=True):
    """The requirements of a claim, and whether a warm sandbox can meet them."""

    template: SandboxTemplateSpec
    """The template of a newly created sandbox."""
    size: Resources
    """Its resources, which count against quotas."""
    resources: Resources | None = None
    """The same, where it differs from the template."""
    image: str | None = None
    """The image that the claim names, instead of the template's."""
    network: NetworkPolicy | None = None
    """The network policy that the request asks for; `None`: that of the template."""
    network_opened: bool = False
    """Whether it may exceed that of the template."""
    obstacle: str = ""
    """Why a warm sandbox cannot meet them; empty if it can."""


def claimed_spec(spec: SandboxSpec, terms: Terms, *, now: datetime) -> SandboxSpec:
    """Return the spec after a claim on these terms."""
    network = terms.network or spec.network
    identity = terms.identity
    if _is_private(network, spec.template, is_opened=identity.network_opened):
        identity = structs.replace(identity, traffic_token_hash=terms.traffic_token_hash)
    changed = structs.replace(
        spec,
        claim=identity,
        paused=False,
        recycle=False,
        wake_on_traffic=terms.wake,
        idle_pause=terms.idle_pause,
        network=network,
        resources=terms.resources or spec.resources,
        image=terms.image or spec.image,
        pause_strategy=terms.pause_strategy or spec.pause_strategy,
        paused_retention_seconds=terms.paused_retention_seconds,
        retained_until=None,
        before_pause=None,
        resumed_for_seconds=None,
    )
    if terms.shutdown_time is not None:
        return structs.replace(changed, shutdown_time=terms.shutdown_time, pause_time=None)
    seconds = terms.identity.timeout_seconds
    if seconds is None:
        return structs.replace(changed, shutdown_time=None, pause_time=None)
    return deadlines.with_timeout(changed, now=now, seconds=seconds)


def _is_private(
    own: NetworkPolicy | None, template: SandboxTemplateSpec | None, *, is_opened: bool
) -> bool:
    """Whether requests to its ports need a token: the sandbox or its template says so."""
    if own is not None and not own.allow_public_traffic:
        return True
    if template is None or (own is not None and is_opened):
        return False
    return not template.network.allow_public_traffic


def claimed(sandbox: Sandbox, terms: Terms, *, now: datetime) -> Sandbox:
    """Return the sandbox after a claim on these terms."""
    labels = {
        **terms.labels,
        **sandbox.metadata.labels,
        **{name: terms.labels[name] for name in OURS if name in terms.labels},
        LABEL_CLAIMED: "true",
        LABEL_TEAM: terms.identity.owner,
    }
    return with_meta(
        structs.replace(sandbox, spec=claimed_spec(sandbox.spec, terms, now=now)),
        owner_references=(),
        labels=labels,
        annotations={**sandbox.metadata.annotations, **terms.annotations},
    )
