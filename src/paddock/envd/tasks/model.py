"""Tasks as they travel over HTTP and as they are kept in files; no behaviour.

The shape is the one that task executors are known by (`name`, `process`, `processStatus`), with
attempts, hooks and output added.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct


class TaskError(Exception):
    """The request cannot be carried out; the message says why, for people."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class TaskPhase(StrEnum):
    """Where a task is."""

    PENDING = "Pending"
    STARTING = "Starting"
    """Written before anything is run: found so after a restart, it may have run."""
    RUNNING = "Running"
    BACKING_OFF = "BackingOff"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FINISHED = (TaskPhase.SUCCEEDED, TaskPhase.FAILED)


class Variable(Struct, frozen=True):
    """One variable of the environment."""

    name: str
    value: str = ""


class Exec(Struct, frozen=True):
    """A command inside a hook."""

    command: tuple[str, ...] = ()


class TaskHook(Struct, frozen=True, kw_only=True, rename="camel"):
    """A command before or after a task; given in either of two shapes."""

    exec: Exec | None = None
    command: tuple[str, ...] = ()
    timeout_seconds: float = 60.0

    @property
    def argv(self) -> tuple[str, ...]:
        """What to run."""
        return self.command or (self.exec.command if self.exec else ())


class TaskHooks(Struct, frozen=True, kw_only=True, rename="camel"):
    """Hooks of a task."""

    pre_start: TaskHook | None = None
    post_stop: TaskHook | None = None


class TaskProcess(Struct, frozen=True, kw_only=True, rename="camel"):
    """What a task runs."""

    command: tuple[str, ...]
    args: tuple[str, ...] = ()
    env: tuple[Variable, ...] = ()
    working_dir: str | None = None
    user: str | None = None
    timeout_seconds: float | None = None
    max_attempts: int = 1
    backoff_seconds: float = 1.0
    grace_seconds: float = 10.0
    first_attempt: int = 1
    lifecycle: TaskHooks = TaskHooks()

    @property
    def argv(self) -> tuple[str, ...]:
        """Program and arguments."""
        return self.command + self.args


class Task(Struct, frozen=True, kw_only=True, rename="camel"):
    """One task as a client asks for it."""

    name: str = ""
    process: TaskProcess | None = None
    pod_template_spec: dict[str, Any] | None = None
    """What a container is made of; for executors with a container runtime."""


class TaskRecord(Struct, frozen=True, kw_only=True):
    """One task and what has become of it; this is what is kept in a file."""

    task: Task
    state: TaskPhase = TaskPhase.PENDING
    attempt: int = 1
    handle: str = ""
    """By which a later executor finds what runs: the launcher's own words."""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    is_final: bool = False
    is_unwanted: bool = False

    @property
    def name(self) -> str:
        """Of the task."""
        return self.task.name


def task_json(record: TaskRecord, head: str, tail: str) -> dict[str, Any]:
    """Write a record as clients read it."""
    status: dict[str, Any] = {
        "attempt": record.attempt,
        "isFinal": record.is_final,
        "outputHead": head,
        "outputTail": tail,
    }
    is_backing_off = record.state is TaskPhase.BACKING_OFF and not record.is_unwanted
    if record.state in FINISHED or is_backing_off:
        status["terminated"] = {
            "exitCode": record.exit_code if record.exit_code is not None else -1,
            "reason": record.reason,
            "message": record.message,
            "startedAt": record.started_at,
            "finishedAt": record.finished_at,
        }
    elif record.state is TaskPhase.RUNNING:
        status["running"] = {"startedAt": record.started_at}
    else:
        status["waiting"] = {"reason": record.reason or str(record.state)}
    result: dict[str, Any] = {"name": record.name, "processStatus": status}
    if record.task.process is not None:
        result["process"] = record.task.process
    if record.task.pod_template_spec is not None:
        result["podTemplateSpec"] = record.task.pod_template_spec
    return result
