"""Runs tasks outside of a sandbox: on the host or in a pod's main container.

Each command runs below a small shell that writes its exit code to a file, in its own session, with
its output going directly to the log. So it survives the executor: a later one finds it by pid and
start time, and reads the exit code even if the command ended meanwhile.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from paddock.envd.process.tree import (
    ProcessIdentity,
    find_members,
    kill_all,
    signal_all,
    start_time,
)
from paddock.envd.tasks.model import TaskRecord
from paddock.envd.tasks.task_launcher import TaskLaunchError

CRASHED = 137
_SHIM = 'exit="$1"; shift; "$@"; code=$?; echo "$code" > "$exit.new"; mv "$exit.new" "$exit"'
"""The shell waits for the command; if it is killed too, there is no code: a crash."""

Enter = Callable[[tuple[str, ...], str | None], tuple[str, ...]]
"""Prepends what enters the right namespaces to a command and its directory."""


def on_host(argv: tuple[str, ...], _directory: str | None) -> tuple[str, ...]:
    """Return the command unchanged: it runs where the executor runs."""
    return argv


class RunningShim:
    """A command below its shell, possibly started by an earlier executor."""

    def __init__(self, pid: int, started: int, exit_file: Path, *, is_child: bool) -> None:
        self._pid = pid
        self._started = started
        self._exit_file = exit_file
        self._is_child = is_child
        self._seen: set[ProcessIdentity] = set()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None
            self._gone.set_result(None)
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    @property
    def handle(self) -> str:
        """The pid and start time, which identify the process."""
        return f"{self._pid}:{self._started}"

    @property
    def cause(self) -> str:
        """Empty: its shell writes the exit code only."""
        return ""

    async def wait(self) -> int:
        """Wait for the shell to end; return the exit code that it wrote."""
        await asyncio.shield(self._gone)
        try:
            return int(self._exit_file.read_text())
        except (OSError, ValueError):
            return CRASHED

    async def signal(self, number: int) -> None:
        """Signal all processes of the command, including those that have left its session.

        TERM is not sent to the shell itself, which must write the exit code.
        """
        if number == signal.SIGKILL:
            kill_all(self._pid, self._seen)
            return
        self._seen |= find_members(self._pid, self._seen)
        signal_all({item for item in self._seen if item.pid != self._pid}, number)

    async def wait_responsive(self) -> None:
        """Return at once: a pause of the pod pauses its executor too."""

    def _ended(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._is_child:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
        if not self._gone.done():
            self._gone.set_result(None)

    def close(self) -> None:
        """Stop waiting; the command keeps running."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class ShimLauncher:
    """Runs commands as the user of this process."""

    def __init__(
        self, enter: Enter = on_host, environment: Callable[[], Mapping[str, str]] | None = None
    ) -> None:
        self._enter = enter
        self._environment = environment or (lambda: dict(os.environ))
        self._running: set[RunningShim] = set()

    async def launch(
        self, record: TaskRecord, argv: tuple[str, ...], log_path: str, *, is_hook: bool = False
    ) -> RunningShim:
        """Start a command below a shell."""
        process = record.task.process
        if process is None:
            raise TaskLaunchError(
                "this executor has no container runtime: set process instead of podTemplateSpec"
            )
        if not argv:
            raise TaskLaunchError("the command is empty")
        exit_file = _exit_file(log_path, record, is_hook=is_hook)
        exit_file.unlink(missing_ok=True)
        try:
            env = {**self._environment(), **{item.name: item.value for item in process.env}}
            inside = self._enter(argv, process.working_dir)
            here = process.working_dir if inside == argv else None
            with open(log_path, "ab") as output:  # noqa: ASYNC230 - handed to the command
                started = subprocess.Popen(  # noqa: ASYNC220 - fork and exec, no waiting
                    ("/bin/sh", "-c", _SHIM, "task", str(exit_file), *inside),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=here or "/",
                    env=env,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            raise TaskLaunchError(f"cannot run {argv[0]!r}: {error}") from error
        started.returncode = 0  # the object must not wait: `RunningShim` does, by pidfd
        born = start_time(started.pid) or 0
        return self._track(RunningShim(started.pid, born, exit_file, is_child=True))

    async def find(self, record: TaskRecord, log_path: str) -> RunningShim | None:
        """Find what an earlier executor started, or its exit code."""
        exit_file = _exit_file(log_path, record, is_hook=False)
        pid, _, started = record.handle.partition(":")
        if not (pid.isdigit() and started.isdigit()):
            return None
        if start_time(int(pid)) != int(started) and not exit_file.exists():
            return None
        if start_time(int(pid)) != int(started):
            # It ended between the executors; a pid that cannot exist stands for it.
            return self._track(RunningShim(1 << 30, 0, exit_file, is_child=False))
        return self._track(RunningShim(int(pid), int(started), exit_file, is_child=False))

    def _track(self, running: RunningShim) -> RunningShim:
        self._running.add(running)
        return running

    def close(self) -> None:
        """Stop waiting; commands keep running."""
        for running in self._running:
            running.close()


def _exit_file(log_path: str, record: TaskRecord, *, is_hook: bool) -> Path:
    prefix = "hook" if is_hook else "exit"
    return Path(log_path).with_name(f"{prefix}-{record.attempt}")
