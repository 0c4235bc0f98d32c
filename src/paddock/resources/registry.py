"""Registry of all kinds, with their names, printer columns and subresources."""

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.builtin import Event, Lease, Namespace, Secret
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Resource, ResourcePart


class Column(ResourcePart, frozen=True, kw_only=True):
    """A printer column of `kubectl get`."""

    name: str
    path: str
    """JSONPath, as in a CRD."""
    type: str = "string"
    """`date` is shown as an age, so it is only for times in the past."""
    priority: int = 0
    """Columns above 0 are shown only with `-o wide`."""


class Scale(ResourcePart, frozen=True, kw_only=True):
    """Paths of the scale subresource."""

    spec_path: str = ".spec.replicas"
    status_path: str = ".status.replicas"
    selector_path: str | None = None


class KindInfo(ResourcePart, frozen=True, kw_only=True):
    """Properties of a kind for discovery, CRDs and tables."""

    cls: type[Resource]
    short_names: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = True
    scale: Scale | None = None
    selectable: tuple[str, ...] = ()
    """Fields that field selectors can use on a Kubernetes API server, in addition to name and
    namespace."""

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return self.cls.KIND

    @property
    def singular(self) -> str:
        """Name of the kind in lower case."""
        return self.cls.KIND.lower()


_AGE = Column(name="Age", path=".metadata.creationTimestamp", type="date")


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> Column:
    return Column(name=name, path=path, type=kind, priority=priority)


KINDS: tuple[KindInfo, ...] = (
    KindInfo(
        cls=SandboxTemplate,
        short_names=("sbt",),
        categories=("paddock",),
        columns=(
            _column("Image", ".spec.image"),
            _column("Build", ".status.build"),
            _column("Revision", ".status.revision"),
            _column("CPU", ".spec.resources.cpu"),
            _column("Memory", ".spec.resources.memory"),
            _column("Public", ".spec.public", "boolean", 1),
            _column("Digest", ".status.imageDigest", priority=1),
            _AGE,
        ),
    ),
    KindInfo(
        cls=Sandbox,
        selectable=(
            ".spec.claim.sandboxId",
            ".spec.claim.owner",
            ".spec.claim.templateId",
            ".spec.claim.idempotencyKey",
            ".status.phase",
            ".status.nodeName",
        ),
        short_names=("sbx",),
        categories=("paddock",),
        columns=(
            _column("Status", ".status.phase"),
            _column("ID", ".spec.claim.sandboxId"),
            _column("Owner", ".spec.claim.owner"),
            _AGE,
            _column("Pool", r".metadata.labels.paddock\.dev/pool", priority=1),
            _column("Shutdown", ".spec.shutdownTime", priority=1),
            _column("Pause", ".spec.pauseTime", priority=1),
            _column("Recycled", ".status.recycledCount", "integer", 1),
            _column("Message", ".status.message", priority=1),
        ),
    ),
    KindInfo(
        cls=SandboxPool,
        scale=Scale(selector_path=".status.selector"),
        selectable=(".spec.templateRef.name",),
        short_names=("sbp",),
        categories=("paddock",),
        columns=(
            _column("Desired", ".status.desired", "integer"),
            _column("Available", ".status.available", "integer"),
            _column("Creating", ".status.creating", "integer"),
            _column("Allocated", ".status.allocated", "integer"),
            _AGE,
            _column("Updated", ".status.updated", "integer", 1),
            _column("Revision", ".status.revision", priority=1),
        ),
    ),
    KindInfo(
        cls=SandboxClaim,
        selectable=(".spec.templateName", ".status.phase"),
        short_names=("sbc",),
        categories=("paddock",),
        columns=(
            _column("Template", ".spec.templateName"),
            _column("Phase", ".status.phase"),
            _column("Wanted", ".spec.replicas", "integer"),
            _column("Claimed", ".status.claimedReplicas", "integer"),
            _AGE,
        ),
    ),
    KindInfo(
        cls=Checkpoint,
        selectable=(
            ".spec.sandboxName",
            ".spec.owner",
            ".spec.checkpointId",
            ".status.checkpointId",
            ".status.phase",
        ),
        short_names=("cp",),
        categories=("paddock",),
        columns=(
            _column("Sandbox", ".spec.sandboxName"),
            _column("Phase", ".status.phase"),
            _column("ID", ".status.checkpointId"),
            _column("Size", ".status.sizeBytes", "integer"),
            _AGE,
        ),
    ),
    KindInfo(
        cls=BatchSandbox,
        scale=Scale(),
        selectable=(".spec.poolRef", ".spec.owner", ".status.phase"),
        short_names=("bsbx",),
        categories=("paddock",),
        columns=(
            _column("Desired", ".spec.replicas", "integer"),
            _column("Allocated", ".status.allocated", "integer"),
            _column("Ready", ".status.ready", "integer"),
            _column("Phase", ".status.phase"),
            _column("Succeeded", ".status.taskSucceeded", "integer", 1),
            _column("Failed", ".status.taskFailed", "integer", 1),
            _column("Expire", ".spec.expireTime", priority=1),
            _AGE,
        ),
    ),
    KindInfo(
        cls=SandboxEnv,
        selectable=(".spec.templateRef.name",),
        short_names=("sbe",),
        categories=("paddock",),
        columns=(
            _column("Template", ".spec.templateRef.name"),
            _column("Members", ".status.memberCount", "integer"),
            _column("Desired", ".status.desired", "integer"),
            _column("Running", ".status.running", "integer"),
            _column("Idle", ".status.idle", "integer"),
            _AGE,
        ),
    ),
    KindInfo(
        cls=TemplateBuild,
        selectable=(".spec.templateName", ".spec.owner", ".status.phase"),
        short_names=("tb",),
        categories=("paddock",),
        columns=(
            _column("Template", ".spec.templateName"),
            _column("Phase", ".status.phase"),
            _column("Step", ".status.step", "integer"),
            _column("Cached", ".status.cachedSteps", "integer"),
            _AGE,
            _column("Failed Step", ".status.failedStep", priority=1),
            _column("Size", ".status.sizeBytes", "integer", 1),
            _column("Message", ".status.message", priority=1),
        ),
    ),
)
"""The kinds of Paddock."""

BUILTINS: tuple[KindInfo, ...] = (
    KindInfo(
        cls=Namespace,
        short_names=("ns",),
        columns=(_column("Status", ".status.phase"), _AGE),
    ),
    KindInfo(
        cls=Event,
        short_names=("ev",),
        has_status=False,
        columns=(
            _column("Last Seen", ".lastTimestamp", "date"),
            _column("Type", ".type"),
            _column("Reason", ".reason"),
            _column("Object", ".involvedObject.name"),
            _column("Message", ".message"),
        ),
    ),
    KindInfo(
        cls=Lease,
        has_status=False,
        columns=(_column("Holder", ".spec.holderIdentity"), _AGE),
    ),
    KindInfo(cls=Secret, has_status=False, columns=(_column("Type", ".type"), _AGE)),
)
"""Built-in Kubernetes kinds that the embedded store keeps."""

ALL: tuple[KindInfo, ...] = KINDS + BUILTINS
BY_KIND = {info.kind: info for info in ALL}


def info_for(kind: str) -> KindInfo:
    """Return a kind by name, plural, singular or short name. Raise `InvalidError` if unknown."""
    for info in ALL:
        if kind in (info.kind, info.cls.PLURAL, info.singular, *info.short_names):
            return info
    known = ", ".join(sorted(info.cls.PLURAL for info in ALL))
    raise InvalidError(f"unknown kind {kind!r}", hint=f"known kinds: {known}")
