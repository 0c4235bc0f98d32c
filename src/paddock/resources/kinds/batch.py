"""BatchSandbox: N sandboxes as one object, with an optional task for each."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar

from paddock.resources.frozen import freeze_documents
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Condition, Resource, ResourcePart

FINALIZER_BATCH = "paddock.dev/batch"


class BatchPhase(StrEnum):
    """Phase of a batch."""

    PENDING = "Pending"
    RUNNING = "Running"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    RESUMING = "Resuming"
    COMPLETED = "Completed"
    FAILED = "Failed"


class TaskResourcePolicy(StrEnum):
    """What happens to the sandbox of a shard whose task has finished."""

    RETAIN = "Retain"
    """The shard keeps its sandbox."""
    RELEASE = "Release"
    """The sandbox is released."""


class EnvVar(ResourcePart, frozen=True, kw_only=True):
    """An environment variable."""

    name: str
    """Name of the environment variable."""
    value: str = ""
    """Value of the environment variable. Defaults to the empty string."""


class Hook(ResourcePart, frozen=True, kw_only=True):
    """A command that runs before or after a task."""

    command: tuple[str, ...]
    """Program and arguments."""
    timeout_seconds: int = 60
    """Number of seconds after which the command is terminated. Defaults to 60."""


class TaskLifecycle(ResourcePart, frozen=True, kw_only=True):
    """Hooks of a task."""

    pre_start: Hook | None = None
    """Runs before the task. If it fails, the task fails."""
    post_stop: Hook | None = None
    """Runs after the task, whether it succeeded or failed."""


class Process(ResourcePart, frozen=True, kw_only=True):
    """The process that a task runs."""

    command: tuple[str, ...]
    """Program and first arguments."""
    args: tuple[str, ...] = ()
    """Further arguments, appended to `command`."""
    env: tuple[EnvVar, ...] = ()
    """Environment variables, merged over those of the sandbox."""
    working_dir: str | None = None
    """Working directory. Defaults to that of the sandbox."""
    user: str | None = None
    """User that the process runs as."""
    lifecycle: TaskLifecycle = TaskLifecycle()
    """Hooks that run before and after the process."""


class TaskSpec(ResourcePart, frozen=True, kw_only=True):
    """Specification of one task."""

    process: Process
    """The process to run."""
    timeout_seconds: int | None = None
    """Number of seconds after which the task is terminated. If unset, there is no limit."""
    max_attempts: int = 1
    """Maximum number of attempts. Defaults to 1."""
    backoff_seconds: float = 1.0
    """Delay before the second attempt, in seconds. It doubles with each further attempt. Defaults
    to 1."""
    grace_seconds: int = 10
    """Number of seconds between SIGTERM and SIGKILL. Defaults to 10."""


class TaskTemplate(ResourcePart, frozen=True, kw_only=True):
    """The task of every shard, before its patch is applied."""

    spec: TaskSpec
    """Specification of the task."""


class BatchSandboxSpec(ResourcePart, frozen=True, kw_only=True):
    """Desired state of a batch."""

    replicas: int = 1
    """Desired number of sandboxes. Defaults to 1."""
    pool_ref: str = ""
    """Source of the sandboxes. Empty: created directly from `template`. A name: taken from that
    pool. `*`: taken from any pool that matches. Immutable."""
    template: SandboxTemplateSpec | None = None
    """Template of the sandboxes. With `poolRef: "*"`, the template that a pool must match."""
    shard_patches: tuple[Mapping[str, Any], ...] = ()
    """Patches of the template. Patch i is merged into the template of shard i. Only allowed if
    `poolRef` is empty."""
    expire_time: datetime | None = None
    """Time at which the batch is deleted. If unset, it is never deleted automatically."""
    task_template: TaskTemplate | None = None
    """The task that every shard runs. If unset, no task runs."""
    shard_task_patches: tuple[Mapping[str, Any], ...] = ()
    """Patches of the task. Patch i is merged into the task of shard i."""
    task_resource_policy_when_completed: TaskResourcePolicy = TaskResourcePolicy.RETAIN
    """Whether a shard whose task has finished releases its sandbox. Defaults to Retain."""
    pause: bool | None = None
    """True pauses every sandbox, false resumes them. If unset, they are left as they are."""
    priority: int = 0
    """Scheduling priority. Batches with a higher value are served first."""
    min_available: int | None = None
    """Minimum number of sandboxes that must be available at once before any is allocated."""
    assign_profile: str = "default"
    """Profile that decides which pool is chosen for `poolRef: "*"`."""
    owner: str = ""
    """Team that the sandboxes are claimed for. Defaults to the namespace of the batch."""

    def __post_init__(self) -> None:
        freeze_documents(self, "shard_patches", "shard_task_patches")


class Allocation(ResourcePart, frozen=True, kw_only=True):
    """The sandbox assigned to a shard."""

    shard: int
    """Index of the shard, starting at 0."""
    sandbox: str = ""
    """Name of the sandbox. Empty while the shard waits for a replacement."""
    namespace: str = ""
    """Namespace of the sandbox, if it differs from that of the batch."""
    uid: str = ""
    """UID of the sandbox."""
    sandbox_id: str = ""
    """Public id of the sandbox, used by clients."""


class TaskState(StrEnum):
    """State of a task."""

    WAITING = "Waiting"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class TaskResult(ResourcePart, frozen=True, kw_only=True):
    """Result of the task of one shard."""

    shard: int
    """Index of the shard, starting at 0."""
    state: TaskState
    """State of the task."""
    attempt: int = 1
    """Number of the current or last attempt, starting at 1."""
    exit_code: int | None = None
    """Exit code of the process."""
    reason: str = ""
    """Reason for the state, in CamelCase."""
    message: str = ""
    """Human-readable details."""
    started_at: datetime | None = None
    """Time at which the last attempt started."""
    finished_at: datetime | None = None
    """Time at which the last attempt finished."""
    output_head: str = ""
    """Beginning of the output."""
    output_tail: str = ""
    """End of the output."""


class BatchSandboxStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a batch."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    phase: BatchPhase = BatchPhase.PENDING
    """Phase of the batch."""
    message: str = ""
    """Human-readable details about the phase."""
    replicas: int = 0
    """Number of existing sandboxes."""
    allocated: int = 0
    """Number of shards that have a sandbox."""
    ready: int = 0
    """Number of allocated sandboxes that are running."""
    pool: str = ""
    """Name of the pool that the batch is assigned to."""
    allocations: tuple[Allocation, ...] = ()
    """The sandbox of each shard."""
    released: tuple[str, ...] = ()
    """UIDs of released sandboxes."""
    task_waiting: int = 0
    """Number of tasks that have not started."""
    task_running: int = 0
    """Number of running tasks."""
    task_succeeded: int = 0
    """Number of tasks that succeeded."""
    task_failed: int = 0
    """Number of tasks that failed."""
    task_unknown: int = 0
    """Number of tasks whose state is unknown."""
    tasks: tuple[TaskResult, ...] = ()
    """Result of each task."""
    pause_observed_generation: int = 0
    """The generation whose `pause` was last carried out."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the batch, such as Ready, Paused and InvalidPatch."""


class BatchSandbox(Resource, frozen=True, kw_only=True):
    """A group of sandboxes as one object, with an optional task for each."""

    KIND: ClassVar[str] = "BatchSandbox"
    PLURAL: ClassVar[str] = "batchsandboxes"

    spec: BatchSandboxSpec = BatchSandboxSpec()
    status: BatchSandboxStatus = BatchSandboxStatus()
