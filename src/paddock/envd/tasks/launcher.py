"""The port through which tasks run: `Launcher` starts commands, `RunningTask` is one of them.

Implemented by `registry_launcher.py` (envd), `shim.py` (host, sidecar) and `cri.py` (containers).
"""

from typing import Protocol

from paddock.envd.tasks.model import TaskRecord


class ExecutorError(Exception):
    """The executor cannot start; the message names the cause and the next step."""


class TaskLaunchError(Exception):
    """The command could not be started; the message says why, for people."""


class RunningTask(Protocol):
    """A command under way."""

    @property
    def handle(self) -> str:
        """What a later launcher finds it by."""
        ...

    async def wait(self) -> int:
        """Wait for its end; a signal counts as 128 and its number."""
        ...

    async def signal(self, number: int) -> None:
        """Signal everything that belongs to it."""
        ...

    async def wait_responsive(self) -> None:
        """Return once it can run: at once, or when its paused sandbox goes on."""
        ...


class Launcher(Protocol):
    """Starts commands whose output goes to the task's log, and finds them again."""

    async def launch(
        self, record: TaskRecord, argv: tuple[str, ...], log_path: str, *, is_hook: bool = False
    ) -> RunningTask:
        """Start a command, or raise `TaskLaunchError`; a hook is never found again."""
        ...

    async def find(self, record: TaskRecord, log_path: str) -> RunningTask | None:
        """Find what an earlier executor started; `None` where it cannot be known any more."""
        ...
