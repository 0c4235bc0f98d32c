"""The TaskRunner port: starts tasks in a sandbox and reports their results.

`assign` sets the tasks of a sandbox: new ones are started, known ones are left alone (so nothing
runs twice, however often it is called), and others are stopped: TERM, grace period, KILL for the
whole process group. `watch` yields the reports of all tasks at once and again on every change; it
ends or raises when the connection does.
"""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from paddock.resources.kinds.batch import TaskSpec, TaskState
from paddock.resources.kinds.sandbox import Sandbox


class TaskOrder(Struct, frozen=True, kw_only=True):
    """One task to run in a sandbox."""

    name: str
    spec: TaskSpec
    first_attempt: int = 1
    """Earlier attempts ran in other sandboxes."""


class TaskReport(Struct, frozen=True, kw_only=True):
    """The state of one task, as its sandbox reports it."""

    name: str
    state: TaskState
    attempt: int = 1
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    output_head: str = ""
    output_tail: str = ""
    is_final: bool = False
    """No attempt follows."""


class TaskRunner(Protocol):
    """Runs tasks in sandboxes."""

    async def assign(
        self, sandbox: Sandbox, sandbox_id: str, orders: tuple[TaskOrder, ...]
    ) -> tuple[TaskReport, ...]:
        """Set the tasks of a sandbox; return their reports."""
        ...

    def watch(self, sandbox: Sandbox, sandbox_id: str) -> AsyncIterator[tuple[TaskReport, ...]]:
        """Yield the reports of all tasks whenever they change."""
        ...
