"""Bodies of E2B's API about templates, their builds and tags."""

from datetime import datetime

from msgspec import UNSET, UnsetType, field

from paddock.api.e2b.schemas import E2BBody, E2BResponse


class TemplateFacts(E2BResponse, frozen=True, kw_only=True):
    """What a list and a single template have in common."""

    template_id: str = field(name="templateID")
    public: bool
    aliases: tuple[str, ...]
    names: tuple[str, ...]
    created_at: datetime
    updated_at: datetime
    last_spawned_at: datetime | None = None
    spawn_count: int = 0


class TemplateBody(TemplateFacts, frozen=True, kw_only=True):
    """A template in a list."""

    build_id: str = field(name="buildID")
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    created_by: None = None
    build_count: int = 1
    envd_version: str
    build_status: str = "ready"
    description: str = ""


class TemplateBuildBody(E2BResponse, frozen=True, kw_only=True):
    """A build of a template in a list."""

    build_id: str = field(name="buildID")
    status: str
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | UnsetType = UNSET
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int | UnsetType = field(default=UNSET, name="diskSizeMB")
    envd_version: str | UnsetType = UNSET
    tags: tuple[str, ...] = ()
    """Tags that the build was requested with. Not part of E2B's API."""


class TemplateDetail(TemplateFacts, frozen=True, kw_only=True):
    """A template with its builds, the newest first."""

    builds: tuple[TemplateBuildBody, ...]


class TemplatePatch(E2BBody, frozen=True, kw_only=True):
    """`PATCH /v2/templates/{id}`."""

    public: bool | None = None


class AliasBody(E2BResponse, frozen=True, kw_only=True):
    """What an alias stands for."""

    template_id: str = field(name="templateID")
    public: bool


class BuildRequestBody(E2BBody, frozen=True, kw_only=True):
    """`POST /v3/templates`."""

    name: str | None = None
    alias: str | None = None
    """The name, as older clients send it."""
    tags: tuple[str, ...] | None = None
    team_id: str | None = field(default=None, name="teamID")
    cpu_count: int | None = None
    memory_mb: int | None = field(default=None, name="memoryMB")
    min_free_disk_mb: int | None = None


class BuildRequestedBody(E2BResponse, frozen=True, kw_only=True):
    """A registered build."""

    template_id: str = field(name="templateID")
    build_id: str = field(name="buildID")
    public: bool
    names: tuple[str, ...]
    tags: tuple[str, ...]
    aliases: tuple[str, ...]


class RegistryBody(E2BBody, frozen=True, kw_only=True):
    """Credentials for the registry of an image."""

    type: str
    """`registry`, `gcp` or `aws`."""
    username: str = ""
    password: str = ""
    service_account_json: str = ""
    aws_access_key_id: str = ""
    aws_secret_access_key: str = ""
    aws_region: str = ""


class BuildStepBody(E2BBody, frozen=True, kw_only=True):
    """One instruction of a build."""

    type: str
    args: tuple[str, ...] | None = None
    files_hash: str | None = None
    force: bool | None = None


class BuildStartBody(E2BBody, frozen=True, kw_only=True):
    """`POST /v2/templates/{id}/builds/{build}`."""

    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: RegistryBody | None = None
    steps: tuple[BuildStepBody, ...] | None = None
    force: bool | None = None
    start_cmd: str | None = None
    ready_cmd: str | None = None


class FileLinkBody(E2BResponse, frozen=True, kw_only=True):
    """Where to upload the files of a step."""

    present: bool
    """Whether files of this hash were uploaded before."""
    url: str


class BuildLogBody(E2BResponse, frozen=True, kw_only=True):
    """An entry of the log of a build."""

    timestamp: datetime
    message: str
    level: str
    step: str | UnsetType = UNSET


class BuildReasonBody(E2BResponse, frozen=True, kw_only=True):
    """Why a build failed."""

    message: str
    step: str | UnsetType = UNSET
    log_entries: tuple[BuildLogBody, ...] = ()


class BuildStatusBody(E2BResponse, frozen=True, kw_only=True):
    """The status of a build, and a part of its log."""

    template_id: str = field(name="templateID")
    build_id: str = field(name="buildID")
    status: str
    logs: tuple[str, ...] = ()
    log_entries: tuple[BuildLogBody, ...] = ()
    reason: BuildReasonBody | UnsetType = UNSET


class BuildLogsBody(E2BResponse, frozen=True, kw_only=True):
    """A page of the log of a build."""

    logs: tuple[BuildLogBody, ...]


class TagsBody(E2BBody, frozen=True, kw_only=True):
    """`POST /templates/tags`."""

    target: str
    tags: tuple[str, ...]


class RemovedTagsBody(E2BBody, frozen=True, kw_only=True):
    """`DELETE /templates/tags`."""

    name: str
    tags: tuple[str, ...]


class AssignedTagsBody(E2BResponse, frozen=True, kw_only=True):
    """Assigned tags and their build."""

    tags: tuple[str, ...]
    build_id: str = field(name="buildID")


class TagBody(E2BResponse, frozen=True, kw_only=True):
    """A tag and its build."""

    tag: str
    build_id: str = field(name="buildID")
    created_at: datetime
