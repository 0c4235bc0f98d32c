"""Requests for builds, independent of the protocol, and the limits of their fields. Pure."""

import msgspec
from msgspec import Struct, structs

from paddock.builds.credentials import RegistryAccess
from paddock.kit.errors import InvalidError
from paddock.resources.default_limits import DEFAULT_DISK_BYTES
from paddock.resources.kinds.template import Resources
from paddock.resources.kinds.template_build import ANNOTATION_LOGIN, BuildStep, TemplateBuild
from paddock.resources.meta import with_meta

DEFAULT_CPU_COUNT = 2
DEFAULT_MEMORY_MB = 1024
MIN_MEMORY_MB = 128
MAX_START_BYTES = 128 << 10
"""Steps and commands of a build, as JSON."""


class BuildLimits(Struct, frozen=True, kw_only=True):
    """Limits of the installation."""

    builds_per_team: int = 20
    """Builds of a team that run at the same time."""
    cpu_count: int = 32
    memory_mb: int = 8192
    disk_mb: int = DEFAULT_DISK_BYTES >> 20


class NewBuild(Struct, frozen=True, kw_only=True):
    """A request to register a build."""

    name: str
    tags: tuple[str, ...] = ()
    cpu_count: int = DEFAULT_CPU_COUNT
    memory_mb: int = DEFAULT_MEMORY_MB
    free_disk_mb: int = 0


class BuildStart(Struct, frozen=True, kw_only=True):
    """What a registered build is to do."""

    from_image: str = ""
    from_template: str = ""
    steps: tuple[BuildStep, ...] = ()
    force: bool = False
    start_command: str = ""
    ready_command: str = ""
    login: RegistryAccess | None = None
    """Credentials for the registry of `from_image`. Not stored."""


def with_start(build: TemplateBuild, wanted: BuildStart) -> TemplateBuild:
    """Return a registered build that is to be built. Its credentials are not part of it."""
    spec = structs.replace(
        build.spec,
        started=True,
        from_image=wanted.from_image,
        from_template=wanted.from_template,
        steps=wanted.steps,
        force=wanted.force,
        start_command=wanted.start_command,
        ready_command=wanted.ready_command,
    )
    annotations = dict(build.metadata.annotations)
    if wanted.login is not None:
        annotations[ANNOTATION_LOGIN] = "in memory"
    return with_meta(structs.replace(build, spec=spec), annotations=annotations)


def resources_of(request: NewBuild, limits: BuildLimits) -> Resources:
    """Return the resources of a build; `InvalidError` if they are out of range."""
    cpu, memory, disk = request.cpu_count, request.memory_mb, request.free_disk_mb
    if cpu < 1:
        raise InvalidError("CPU count must be at least 1")
    if cpu > limits.cpu_count:
        raise InvalidError(f"CPU count must be at most {limits.cpu_count}")
    if cpu != 1 and cpu % 2:
        raise InvalidError("CPU count must be 1 or an even number")
    if memory < MIN_MEMORY_MB:
        raise InvalidError(f"Memory must be at least {MIN_MEMORY_MB} MiB")
    if memory > limits.memory_mb:
        raise InvalidError(f"Memory must be at most {limits.memory_mb} MiB")
    if memory % 2:
        raise InvalidError("Memory must be divisible by 2")
    if not 0 <= disk <= limits.disk_mb:
        raise InvalidError(f"Free disk space must be between 0 and {limits.disk_mb} MiB")
    # Every sandbox can write that much already, or the maximum is higher.
    is_more = disk > DEFAULT_DISK_BYTES >> 20
    return Resources(cpu=str(cpu), memory=f"{memory}Mi", disk=f"{disk}Mi" if is_more else None)


def check_start(request: BuildStart) -> None:
    """Raise `InvalidError` for a start that has no base, or two, or too many steps."""
    if request.from_image and request.from_template:
        raise InvalidError("only one of fromImage and fromTemplate can be given")
    if not request.from_image and not request.from_template:
        raise InvalidError("either fromImage or fromTemplate must be given")
    if request.login is not None and not request.from_image:
        raise InvalidError("fromImageRegistry needs fromImage")
    parts = (request.steps, request.start_command, request.ready_command)
    if (size := len(msgspec.json.encode(parts))) > MAX_START_BYTES:
        raise InvalidError(
            f"the steps have {size} bytes; a build has at most {MAX_START_BYTES}",
            hint="COPY a script with the commands and run it",
        )
