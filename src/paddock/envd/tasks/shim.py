"""RunningTask tasks outside of a sandbox: on the host or in a pod's main container.

Each command runs below a small shell that leaves its exit code in a file, in a session of its
own, with its output going straight to the log: so it survives the executor, and a later one
finds it by pid and start, and learns how it ended even if nobody waited for it.
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
from paddock.envd.tasks.launcher import TaskLaunchError
from paddock.envd.tasks.model import TaskRecord

CRASHED = 137
_SHIM = 'exit="$1"; shift; "$@"; code=$?; echo "$code" > "$exit.new"; mv "$exit.new" "$exit"'
"""The shell stays until the command has ended; killed with it, it leaves no code: a crash."""

Enter = Callable[[tuple[str, ...], str | None], tuple[str, ...]]
"""Puts before a command (and its directory) what brings it to the right place."""


def on_host(argv: tuple[str, ...], _directory: str | None) -> tuple[str, ...]:
    """Run where the executor runs."""
    return argv


class RunningShim:
    """A command below its shell, perhaps of an earlier executor."""

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
        """Its pid and start: no other process ever has both."""
        return f"{self._pid}:{self._started}"

    async def wait(self) -> int:
        """Wait for the shell's end and read what it left."""
        await asyncio.shield(self._gone)
        try:
            return int(self._exit_file.read_text())
        except (OSError, ValueError):
            return CRASHED

    async def signal(self, number: int) -> None:
        """Signal everything that belongs to the command, also what was seen and strayed since.

        The shell itself is spared a TERM: it must live to tell how its command took it.
        """
        if number == signal.SIGKILL:
            kill_all(self._pid, self._seen)
            return
        self._seen |= find_members(self._pid, self._seen)
        signal_all({item for item in self._seen if item.pid != self._pid}, number)

    async def wait_responsive(self) -> None:
        """Return at once: whoever pauses a pod pauses its executor too."""

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
        """Stop waiting; the command goes on."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class ShimLauncher:
    """Runs commands as this process's user."""

    def __init__(
        self, enter: Enter = on_host, environment: Callable[[], Mapping[str, str]] | None = None
    ) -> None:
        self._enter = enter
        self._environment = environment or (lambda: dict(os.environ))
        self._running: set[RunningShim] = set()

    async def launch(
        self, record: TaskRecord, argv: tuple[str, ...], log_path: str, *, is_hook: bool = False
    ) -> RunningShim:
        """Start a command below its shell."""
        process = record.task.process
        if process is None:
            raise TaskLaunchError("this executor has no container runtime: give process instead")
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
        started.returncode = 0  # the object must not wait: we do, by pidfd
        born = start_time(started.pid) or 0
        return self._track(RunningShim(started.pid, born, exit_file, is_child=True))

    async def find(self, record: TaskRecord, log_path: str) -> RunningShim | None:
        """Find what an earlier executor started, or how it ended."""
        exit_file = _exit_file(log_path, record, is_hook=False)
        pid, _, started = record.handle.partition(":")
        if not (pid.isdigit() and started.isdigit()):
            return None
        if start_time(int(pid)) != int(started) and not exit_file.exists():
            return None
        if start_time(int(pid)) != int(started):
            # It ended while nobody looked; a pid that cannot exist stands for it.
            return self._track(RunningShim(1 << 30, 0, exit_file, is_child=False))
        return self._track(RunningShim(int(pid), int(started), exit_file, is_child=False))

    def _track(self, running: RunningShim) -> RunningShim:
        self._running.add(running)
        return running

    def close(self) -> None:
        """Stop waiting for everything."""
        for running in self._running:
            running.close()


def _exit_file(log_path: str, record: TaskRecord, *, is_hook: bool) -> Path:
    word = "hook" if is_hook else "exit"
    return Path(log_path).with_name(f"{word}-{record.attempt}")
