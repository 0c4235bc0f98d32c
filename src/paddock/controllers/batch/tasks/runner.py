"""The TaskRunner port: how tasks get into a sandbox and how their results come back.

`assign` says what a sandbox should run: a task it does not know is begun, one it knows is left as
it is (so nothing runs twice however often this is called), and others are stopped: TERM, grace,
KILL for the whole process group. `follow` gives what is known of all tasks at once and again
whenever that changes; it ends or raises when the connection does.
"""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from paddock.resources.kinds.batch import TaskSpec, TaskState
from paddock.resources.kinds.sandbox import Sandbox


class Order(Struct, frozen=True, kw_only=True):
    """One task as a sandbox is told of it."""

    name: str
    spec: TaskSpec
    first_attempt: int = 1
    """Attempts before this one were made elsewhere."""


class Report(Struct, frozen=True, kw_only=True):
    """What a sandbox says of one task."""

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
    """No further attempt follows."""


class TaskRunner(Protocol):
    """Runs tasks in sandboxes."""

    async def assign(
        self, sandbox: Sandbox, sandbox_id: str, orders: tuple[Order, ...]
    ) -> tuple[Report, ...]:
        """Say what a sandbox should run; gives what it says of its tasks."""
        ...

    def follow(self, sandbox: Sandbox, sandbox_id: str) -> AsyncIterator[tuple[Report, ...]]:
        """Give reports as they change."""
        ...
