"""Tasks as they are sent over HTTP and stored in files; data only.

The format is that of task executors (`name`, `process`, `processStatus`), extended by attempts,
hooks and output.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct


class TaskError(Exception):
    """The request is refused; the message is sent to the client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class TaskPhase(StrEnum):
    """The phase of a task."""

    PENDING = "Pending"
    STARTING = "Starting"
    """Saved before anything runs: after a restart the command may have run."""
    RUNNING = "Running"
    BACKING_OFF = "BackingOff"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FINISHED = (TaskPhase.SUCCEEDED, TaskPhase.FAILED)


class Variable(Struct, frozen=True):
    """An environment variable."""

    name: str
    value: str = ""


class Exec(Struct, frozen=True):
    """The command of a hook."""

    command: tuple[str, ...] = ()


class TaskHook(Struct, frozen=True, kw_only=True, rename="camel"):
    """A command before or after a task, given as `exec.command` or `command`."""

    exec: Exec | None = None
    command: tuple[str, ...] = ()
    timeout_seconds: float = 60.0

    @property
    def argv(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return self.command or (self.exec.command if self.exec else ())


class TaskHooks(Struct, frozen=True, kw_only=True, rename="camel"):
    """The hooks of a task."""

    pre_start: TaskHook | None = None
    post_stop: TaskHook | None = None


class TaskProcess(Struct, frozen=True, kw_only=True, rename="camel"):
    """The command of a task."""

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
        """The program and its arguments."""
        return self.command + self.args


class Task(Struct, frozen=True, kw_only=True, rename="camel"):
    """A task as requested by a client."""

    name: str = ""
    process: TaskProcess | None = None
    pod_template_spec: dict[str, Any] | None = None
    """The pod template of the container; for executors with a container runtime."""


class TaskRecord(Struct, frozen=True, kw_only=True):
    """A task and its state, as stored in a file."""

    task: Task
    state: TaskPhase = TaskPhase.PENDING
    attempt: int = 1
    handle: str = ""
    """The launcher's string by which a later executor finds the command."""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    is_final: bool = False
    is_unwanted: bool = False

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task.name


def task_json(record: TaskRecord, head: str, tail: str) -> dict[str, Any]:
    """Return a record as sent to clients."""
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
