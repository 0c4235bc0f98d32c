"""Runs the tasks of a sandbox through envd's process registry, with output into the log.

A task ends with its leader. Processes that it leaves in the background may keep running; their
output is still logged. A later envd finds tasks by the tag that init keeps.
"""

import asyncio
import contextlib
import os

from paddock.envd.process.events import Subscription
from paddock.envd.process.init_protocol import SignalScope
from paddock.envd.process.process import ManagedProcess
from paddock.envd.process.registry import ProcessRegistry
from paddock.envd.process.spawner import Command, ExitStatus, SandboxGoneError, SpawnError
from paddock.envd.rpc.connect_frames import ConnectError
from paddock.envd.rpc.messages import ProcessConfig
from paddock.envd.sandbox_context import SandboxContext
from paddock.envd.tasks.model import TaskRecord
from paddock.envd.tasks.task_launcher import TaskLaunchError

MAX_LOG_BYTES = 64 << 20
"""Output beyond this is discarded."""
DRAIN_SECONDS = 0.25
TAG = "paddock-task:"


class _Log:
    """A log of bounded size."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._left = MAX_LOG_BYTES - os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Append up to the limit; a full disk loses output, but does not fail the task."""
        if self._left > 0:
            with contextlib.suppress(OSError):
                self._left -= os.write(self._fd, data[: self._left])
            if self._left <= 0:
                with contextlib.suppress(OSError):
                    os.write(self._fd, b"\n[the log is full: nothing more is kept]\n")

    def close(self) -> None:
        os.close(self._fd)


class RunningProcess:
    """The process of a task."""

    def __init__(self, process: ManagedProcess, subscription: Subscription, log_path: str) -> None:
        self._process = process
        self._subscription = subscription
        self._exit: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self._quiet = asyncio.Event()
        process.on_leader_exit = self._exited
        if process.leader_exit is not None:
            self._exited(process.leader_exit)
        self._reader = asyncio.get_running_loop().create_task(
            self._read(_Log(log_path)), name=f"log of {process.pid}"
        )

    @property
    def handle(self) -> str:
        """The pid, for people; the process is found by its tag."""
        return str(self._process.pid)

    @property
    def cause(self) -> str:
        """Why the process was killed, or empty."""
        return self._process.cause or ""

    async def wait(self) -> int:
        """Wait for the leader to exit, and shortly for the rest of its output."""
        status = await asyncio.shield(self._exit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._quiet.wait()
        return 128 + status.signal if status.signal else status.code

    async def signal(self, number: int) -> None:
        """Signal the whole process tree; an ended one is no error."""
        with contextlib.suppress(SandboxGoneError, ProcessLookupError):
            await self._process.signal(number, SignalScope.TREE)

    async def wait_responsive(self) -> None:
        """Return once the sandbox responds, or has ended."""
        with contextlib.suppress(SandboxGoneError):
            await self._process.wait_responsive()

    def _exited(self, status: ExitStatus) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    async def _read(self, log: _Log) -> None:
        try:
            while True:
                for event in await self._subscription.take(3600.0):
                    if event.data is not None:
                        data = event.data
                        log.write(data.stdout or data.stderr or data.pty or b"")
                    if event.end is not None:
                        return
        finally:
            self._quiet.set()
            self._process.unsubscribe(self._subscription)
            log.close()

    def close(self) -> None:
        """Stop logging; the process keeps running."""
        self._reader.cancel()


class RegistryLauncher:
    """Runs tasks as users of the sandbox."""

    def __init__(self, registry: ProcessRegistry, context: SandboxContext) -> None:
        self._registry = registry
        self._context = context
        self._running: set[RunningProcess] = set()

    async def launch(
        self, record: TaskRecord, argv: tuple[str, ...], log_path: str, *, is_hook: bool = False
    ) -> RunningProcess:
        """Start a command with the user, directory and variables of the task."""
        process = record.task.process
        if process is None:
            raise TaskLaunchError(
                "this executor has no container runtime: set process instead of podTemplateSpec"
            )
        try:
            user = self._context.user(process.user)
            directory = self._context.directory(process.working_dir or "", user)
            env = self._context.variables(user) | {item.name: item.value for item in process.env}
            arguments = argv
            if argv:
                arguments, env = self._context.invocation(argv, env)
        except ConnectError as error:
            raise TaskLaunchError(str(error)) from error
        command = Command(
            argv=arguments, env=env, cwd=directory, uid=user.uid, gid=user.gid,
            groups=user.groups, has_stdin=False,
        )  # fmt: skip
        config = ProcessConfig(cmd=argv[0] if argv else "", args=argv[1:], cwd=directory)
        try:
            started, subscription = await self._registry.start(
                command, config, None if is_hook else _tag(record)
            )
        except SpawnError as error:
            raise TaskLaunchError(str(error)) from error
        except SandboxGoneError as error:
            raise TaskLaunchError(f"the sandbox has ended: {error}") from error
        return self._track(RunningProcess(started, subscription, log_path))

    async def find(self, record: TaskRecord, log_path: str) -> RunningProcess | None:
        """Find the process that an earlier envd started."""
        found = self._registry.find(pid=None, tag=_tag(record), with_ended=True)
        if found is None:
            return None
        return self._track(RunningProcess(found, found.subscribe(), log_path))

    def _track(self, running: RunningProcess) -> RunningProcess:
        self._running.add(running)
        return running

    def close(self) -> None:
        """Stop logging; processes keep running."""
        for running in self._running:
            running.close()


def _tag(record: TaskRecord) -> str:
    return f"{TAG}{record.name}:{record.attempt}"
