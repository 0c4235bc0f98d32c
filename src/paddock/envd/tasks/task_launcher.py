"""The `TaskLauncher` port, through which tasks run; `RunningTask` is one running command.

Implemented by `registry_launcher.py` (envd), `shim.py` (host, sidecar) and `cri.py` (containers).
"""

from typing import Protocol

from paddock.envd.tasks.model import TaskRecord


class ExecutorError(Exception):
    """The executor cannot start; the message names the cause and the next step."""


class TaskLaunchError(Exception):
    """The command could not be started; the message is for people."""


class RunningTask(Protocol):
    """A running command."""

    @property
    def handle(self) -> str:
        """The string by which a later launcher finds the command."""
        ...

    @property
    def cause(self) -> str:
        """Why the ended command was killed, if the launcher knows; otherwise empty."""
        ...

    async def wait(self) -> int:
        """Wait for the end; return the exit code, or 128 plus the signal number."""
        ...

    async def signal(self, number: int) -> None:
        """Signal all processes of the command."""
        ...

    async def wait_responsive(self) -> None:
        """Return once the command can run: at once, or when its paused sandbox is resumed."""
        ...


class TaskLauncher(Protocol):
    """Starts commands whose output goes to the task's log, and finds them after a restart."""

    async def launch(
        self, record: TaskRecord, argv: tuple[str, ...], log_path: str, *, is_hook: bool = False
    ) -> RunningTask:
        """Start a command, or raise `TaskLaunchError`; hooks are not found after a restart."""
        ...

    async def find(self, record: TaskRecord, log_path: str) -> RunningTask | None:
        """Return what an earlier executor started, or `None` if that is unknown."""
        ...
