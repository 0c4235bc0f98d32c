"""What clients see of a build: its status and, of a failed one, the reason. Pure."""

from msgspec import Struct

from paddock.builds.log_files import BuildLogEntry
from paddock.resources.kinds.template_build import BuildPhase, TemplateBuild

WAITING, BUILDING, READY, ERROR = "waiting", "building", "ready", "error"
SUPERSEDED = "The build was canceled because it was superseded by a newer one."


class BuildReason(Struct, frozen=True, kw_only=True):
    """Why a build failed."""

    message: str
    step: str = ""
    """The step that failed: its number from 1, `base` or `finalize`; empty if it was none."""
    entries: tuple[BuildLogEntry, ...] = ()
    """Warnings and errors in the log of that step."""


class BuildState(Struct, frozen=True, kw_only=True):
    """The state of a build, and a part of its log."""

    build: TemplateBuild
    status: str
    entries: tuple[BuildLogEntry, ...] = ()
    reason: BuildReason | None = None


def status_of(build: TemplateBuild) -> str:
    """Return the status of a build.

    It is being built from the moment its steps were submitted, and has failed from the moment it
    was canceled: the controller may follow a little later.
    """
    phase = build.status.phase
    if phase is BuildPhase.READY:
        return READY
    if phase is BuildPhase.FAILED or build.spec.canceled or build.is_deleting:
        return ERROR
    if phase is BuildPhase.BUILDING or build.spec.started:
        return BUILDING
    return WAITING


def message_of(build: TemplateBuild) -> str:
    """Return why a build failed."""
    if build.status.phase is BuildPhase.FAILED and build.status.message:
        return build.status.message
    return build.spec.canceled or "The build was canceled."
