"""TemplateBuild: one build of a template, from a base through steps to a stored state."""

from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import Condition, Resource, ResourcePart

FINALIZER_BUILD = "paddock.dev/template-build"
LABEL_BUILD = "paddock.dev/template-build"
"""Name of the TemplateBuild, on its sandboxes and on the checkpoints of its layers."""
LABEL_LAYER = "paddock.dev/template-layer"
"""Key of a layer, on the checkpoint that stores it."""
ANNOTATION_LOGIN = "paddock.dev/registry-credentials"
"""On a build that was started with credentials of a registry. They are in memory only."""

REASON_BASE = "base"
"""`status.failedStep` of a build whose image or base template cannot be used."""
REASON_FINALIZE = "finalize"
"""`status.failedStep` of a build whose start or ready command failed."""


class BuildPhase(StrEnum):
    """Phase of a build."""

    WAITING = "Waiting"
    """Registered. Its steps have not been submitted, or it waits for its turn."""
    BUILDING = "Building"
    READY = "Ready"
    FAILED = "Failed"


class BuildStep(ResourcePart, frozen=True, kw_only=True):
    """One instruction of a build."""

    type: str
    """`RUN`, `COPY`, `ADD`, `ENV`, `ARG`, `WORKDIR` or `USER`."""
    args: tuple[str, ...] = ()
    """Arguments. Their meaning depends on the type."""
    files_hash: str = ""
    """Hash of the uploaded files of `COPY` and `ADD`."""
    force: bool = False
    """Whether this step and all later ones run even if their layers are cached."""


class TemplateBuildSpec(ResourcePart, frozen=True, kw_only=True):
    """What to build."""

    template_name: str
    """Name of the SandboxTemplate in the same namespace. Immutable."""
    tags: tuple[str, ...] = ()
    """Tags that the build was requested with. Empty means `default`."""
    started: bool = False
    """Whether the steps were submitted. They are immutable from then on."""
    canceled: str = ""
    """Why the build is to be canceled. Empty means it is not."""
    from_image: str = ""
    """Image to start from. Exactly one of `fromImage` and `fromTemplate` is set once started."""
    from_template: str = ""
    """Template or snapshot to start from."""
    steps: tuple[BuildStep, ...] = ()
    """Instructions, in order."""
    force: bool = False
    """Whether nothing is taken from the cache, and the registry is asked for `fromImage` again."""
    start_command: str = ""
    """Command that is started after the steps. Its processes are part of the template."""
    ready_command: str = ""
    """The template is stored once this command exits with 0."""
    resources: Resources = Resources()
    """Resource limits of the build and of sandboxes of the template."""
    owner: str = ""
    """Team that owns the build."""
    key_id: str = ""
    """Id of the API key that requested the build. Sandboxes of the build count for its quota."""


class TemplateBuildStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a build."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    phase: BuildPhase = BuildPhase.WAITING
    """Phase of the build."""
    message: str = ""
    """Why the build failed."""
    failed_step: str = ""
    """Step that failed: its number from 1, `base` or `finalize`."""
    step: int = 0
    """Number of steps that are complete."""
    cached_steps: int = 0
    """Number of steps that were taken from the cache."""
    image_digest: str = ""
    """Digest of the image that the base stood for."""
    checkpoint_id: str = ""
    """Public id of the checkpoint that sandboxes of this build start from."""
    template: SandboxTemplateSpec | None = None
    """Template that the build resulted in."""
    size_bytes: int = 0
    """Size in bytes of the stored result."""
    start_time: datetime | None = None
    """Time at which the build began."""
    completion_time: datetime | None = None
    """Time at which the build ended."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the build."""


class TemplateBuild(Resource, frozen=True, kw_only=True):
    """One build of a template. Its name is a UUID, the `buildID` of the API."""

    KIND: ClassVar[str] = "TemplateBuild"
    PLURAL: ClassVar[str] = "templatebuilds"

    spec: TemplateBuildSpec = TemplateBuildSpec(template_name="")
    status: TemplateBuildStatus = TemplateBuildStatus()

    @property
    def team(self) -> str:
        """The team whose builds it takes turns with."""
        return self.spec.owner or self.metadata.namespace

    @property
    def has_ended(self) -> bool:
        """Whether the build is ready or has failed."""
        return self.status.phase in (BuildPhase.READY, BuildPhase.FAILED)
