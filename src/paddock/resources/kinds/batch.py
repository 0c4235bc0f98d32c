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
    """Where a batch is."""

    PENDING = "Pending"
    RUNNING = "Running"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    RESUMING = "Resuming"
    COMPLETED = "Completed"
    FAILED = "Failed"


class TaskResourcePolicy(StrEnum):
    """What happens to a shard whose task has ended."""

    RETAIN = "Retain"
    RELEASE = "Release"


class EnvVar(ResourcePart, frozen=True, kw_only=True):
    """One variable."""

    name: str
    """Of the variable."""
    value: str = ""
    """Of the variable."""


class Hook(ResourcePart, frozen=True, kw_only=True):
    """A command before or after a task."""

    command: tuple[str, ...]
    """Program and arguments."""
    timeout_seconds: int = 60
    """It is ended after this."""


class TaskLifecycle(ResourcePart, frozen=True, kw_only=True):
    """Hooks of a task."""

    pre_start: Hook | None = None
    """Before the task; its failure fails the task."""
    post_stop: Hook | None = None
    """After the task, however it ended."""


class Process(ResourcePart, frozen=True, kw_only=True):
    """What a task runs."""

    command: tuple[str, ...]
    """Program and first arguments."""
    args: tuple[str, ...] = ()
    """Further arguments."""
    env: tuple[EnvVar, ...] = ()
    """Variables over those of the sandbox."""
    working_dir: str | None = None
    """Where it runs; the sandbox's own where absent."""
    user: str | None = None
    """Who runs it."""
    lifecycle: TaskLifecycle = TaskLifecycle()
    """What runs before and after."""


class TaskSpec(ResourcePart, frozen=True, kw_only=True):
    """One task."""

    process: Process
    """What runs."""
    timeout_seconds: int | None = None
    """It is ended after this; absent means never."""
    max_attempts: int = 1
    """How often it is tried."""
    backoff_seconds: float = 1.0
    """Before the second attempt; doubles with each."""
    grace_seconds: int = 10
    """Between TERM and KILL."""


class TaskTemplate(ResourcePart, frozen=True, kw_only=True):
    """The task of every shard, before its patch."""

    spec: TaskSpec
    """The task."""


class BatchSandboxSpec(ResourcePart, frozen=True, kw_only=True):
    """How many sandboxes, from where, doing what."""

    replicas: int = 1
    """How many sandboxes."""
    pool_ref: str = ""
    """Empty: made directly from `template`. A name: from that pool. `*`: from whichever fits."""
    template: SandboxTemplateSpec | None = None
    """With `*`, what the pool must match."""
    shard_patches: tuple[Mapping[str, Any], ...] = ()
    """Patch i is merged into shard i's template; direct mode only."""
    expire_time: datetime | None = None
    """When the batch is deleted; absent means never."""
    task_template: TaskTemplate | None = None
    """What every shard runs; absent means nothing."""
    shard_task_patches: tuple[Mapping[str, Any], ...] = ()
    """Patch i is merged into the task of shard i."""
    task_resource_policy_when_completed: TaskResourcePolicy = TaskResourcePolicy.RETAIN
    """Whether a shard whose task ended gives its sandbox back."""
    pause: bool | None = None
    """On pauses every sandbox, off resumes them, absent leaves them."""
    priority: int = 0
    """Higher is served first."""
    min_available: int | None = None
    """Nothing is allocated until so many can be at once."""
    assign_profile: str = "default"
    """How a pool is chosen for `*`."""
    owner: str = ""
    """The team its sandboxes are claimed for."""

    def __post_init__(self) -> None:
        freeze_documents(self, "shard_patches", "shard_task_patches")


class Allocation(ResourcePart, frozen=True, kw_only=True):
    """Which sandbox serves which shard."""

    shard: int
    """Counted from 0."""
    sandbox: str = ""
    """Its name; empty while the shard waits for another one."""
    namespace: str = ""
    """Of the sandbox, where it is not the batch's own."""
    uid: str = ""
    """Of the sandbox."""
    sandbox_id: str = ""
    """By which clients address it."""


class TaskState(StrEnum):
    """Where a task is."""

    WAITING = "Waiting"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class TaskResult(ResourcePart, frozen=True, kw_only=True):
    """What became of one shard's task."""

    shard: int
    """Counted from 0."""
    state: TaskState
    """Where the task is."""
    attempt: int = 1
    """Counted from 1."""
    exit_code: int | None = None
    """Of the process."""
    reason: str = ""
    """One word: why it is in this state."""
    message: str = ""
    """One sentence for people."""
    started_at: datetime | None = None
    """Of the last attempt."""
    finished_at: datetime | None = None
    """Of the last attempt."""
    output_head: str = ""
    """How its output begins."""
    output_tail: str = ""
    """How its output ends."""


class BatchSandboxStatus(ResourcePart, frozen=True, kw_only=True):
    """What is."""

    observed_generation: int = 0
    """The generation that this status is about."""
    phase: BatchPhase = BatchPhase.PENDING
    """Where the batch is."""
    message: str = ""
    """One sentence for people."""
    replicas: int = 0
    """Sandboxes that are there."""
    allocated: int = 0
    """Shards that have a sandbox."""
    ready: int = 0
    """Of these, running."""
    pool: str = ""
    """The pool it was assigned to."""
    allocations: tuple[Allocation, ...] = ()
    """Which sandbox serves which shard."""
    released: tuple[str, ...] = ()
    """Uids given back."""
    task_waiting: int = 0
    task_running: int = 0
    task_succeeded: int = 0
    task_failed: int = 0
    task_unknown: int = 0
    tasks: tuple[TaskResult, ...] = ()
    """What became of each task."""
    pause_observed_generation: int = 0
    """The generation whose `pause` was carried out last."""
    conditions: tuple[Condition, ...] = ()
    """Ready, Paused, InvalidPatch and so on."""


class BatchSandbox(Resource, frozen=True, kw_only=True):
    """N sandboxes as one object."""

    KIND: ClassVar[str] = "BatchSandbox"
    PLURAL: ClassVar[str] = "batchsandboxes"

    spec: BatchSandboxSpec = BatchSandboxSpec()
    status: BatchSandboxStatus = BatchSandboxStatus()
