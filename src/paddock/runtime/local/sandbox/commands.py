"""Commands that the node itself runs in a sandbox: start and ready commands.

They use the node's own channel to init, separate from envd's. The output of a start command goes
to the sandbox's log, also after a restart of the node.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from paddock.envd.process.init_client import InitClient, take_channel
from paddock.envd.process.init_protocol import (
    NODE_CHANNEL_FD,
    ChannelClosedError,
    ProcessRecord,
    RecordFlags,
    SignalScope,
    SpawnFlags,
    SpawnRequest,
)
from paddock.envd.process.shells import NO_SHELL, find_shell
from paddock.envd.users import is_id
from paddock.kit.errors import InvalidError
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.sandbox.log_file import LogFile

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READ = 65536
_MAX_PARTIAL = 8192
_MAX_TABLE = 1 << 20


SpawnTask = Callable[[str, Coroutine[Any, Any, None]], None]


class SandboxUser(Struct, frozen=True):
    """A user inside a sandbox."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


class Commands:
    """Runs the node's commands in one sandbox."""

    def __init__(self, pidfd: int, pid: int, log_file: LogFile, spawn_task: SpawnTask) -> None:
        self._pid = pid
        self._spawn_task = spawn_task
        self._log_file = log_file
        self._loop = asyncio.get_running_loop()
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._readers: dict[int, tuple[str, bytearray]] = {}
        self._client = InitClient(
            take_channel(pidfd, fd=NODE_CHANNEL_FD), on_exit=self._on_exit, on_lost=self._on_lost
        )
        self._last = 0

    async def attach(self) -> None:
        """Find commands that a previous node process started."""
        for record in await self._client.attach():
            self._last = max(self._last, record.id)
            self._read_output(record)
            if record.flags & RecordFlags.EXITED:
                await self._client.forget(record.id)

    async def start(
        self, command: str, *, user: str, env: Mapping[str, str], cwd: str | None
    ) -> int:
        """Start a command and return its pid; its output goes to the sandbox's log."""
        record = await self._spawn(command, user=user, env=env, cwd=cwd)
        self._read_output(record)
        return record.pid

    async def run(
        self, command: str, *, user: str, env: Mapping[str, str], cwd: str | None, timeout: float
    ) -> int:
        """Run a command and return its exit status; it is killed after `timeout` seconds."""
        ended: asyncio.Future[int] = self._loop.create_future()
        record = await self._spawn(command, user=user, env=env, cwd=cwd, ended=ended)
        self._read_output(record, keep=False)
        return await self._wait(record, ended, timeout)

    async def run_program(self, path: str, *, env: Mapping[str, str], timeout: float) -> int:
        """Run a program as root like `run`, without a shell; its output goes to the log."""
        ended: asyncio.Future[int] = self._loop.create_future()
        account = find_user(self._pid, "root")
        record = await self._spawn_as(account, [path], env=env, cwd="/", ended=ended)
        self._read_output(record)
        return await self._wait(record, ended, timeout)

    async def _wait(
        self, record: ProcessRecord, ended: "asyncio.Future[int]", timeout: float
    ) -> int:
        """Wait for a command and return its exit status; kill it after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return os.waitstatus_to_exitcode(await ended)
        except TimeoutError:
            await self._client.signal(record.id, signal.SIGKILL, SignalScope.TREE)
            return -signal.SIGKILL
        finally:
            self._exits.pop(record.id, None)

    def close(self) -> None:
        """Close the channel; commands keep running."""
        for fd in list(self._readers):
            self._close_output(fd)
        self._client.close()

    async def _spawn(
        self,
        command: str,
        *,
        user: str,
        env: Mapping[str, str],
        cwd: str | None,
        ended: "asyncio.Future[int] | None" = None,
    ) -> ProcessRecord:
        account = find_user(self._pid, user)
        shell = find_sandbox_shell(self._pid)
        return await self._spawn_as(
            account, [shell, "-l", "-c", command], env=env, cwd=cwd, ended=ended
        )

    async def _spawn_as(
        self,
        account: SandboxUser,
        argv: list[str],
        *,
        env: Mapping[str, str],
        cwd: str | None,
        ended: "asyncio.Future[int] | None",
    ) -> ProcessRecord:
        self._last += 1
        if ended is not None:
            self._exits[self._last] = ended
        own = {"PATH": _PATH, "HOME": account.home, "USER": account.name, "LOGNAME": account.name}
        return await self._client.spawn(
            SpawnRequest(
                id=self._last,
                argv=argv,
                env=own | dict(env),
                cwd=cwd or account.home,
                uid=account.uid,
                gid=account.gid,
                groups=account.groups,
                flags=SpawnFlags(0),
            )
        )

    def _read_output(self, record: ProcessRecord, *, keep: bool = True) -> None:
        for fd, name in ((record.stdout, "stdout"), (record.stderr, "stderr")):
            if fd is None:
                continue
            os.set_blocking(fd, False)
            self._readers[fd] = (name if keep else "", bytearray())
            self._loop.add_reader(fd, self._read, fd)

    def _read(self, fd: int) -> None:
        name, partial = self._readers[fd]
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if name:
            partial += data
            *lines, rest = bytes(partial).split(b"\n")
            partial[:] = rest
            if partial and (not data or len(partial) > _MAX_PARTIAL):
                lines.append(bytes(partial))
                partial.clear()
            for line in lines:
                text = line.decode(errors="replace").rstrip("\r")
                self._log_file.write(
                    text, level="error" if name == "stderr" else "info", stream=name
                )
        if not data:
            self._close_output(fd)

    def _close_output(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._readers.pop(fd, None)
        os.close(fd)

    def _on_exit(self, record: ProcessRecord) -> None:
        future = self._exits.get(record.id)
        if future is not None and not future.done():
            future.set_result(record.wait_status)
        elif future is None:
            code = os.waitstatus_to_exitcode(record.wait_status)
            self._log_file.write("start command ended", level="info", exit_code=str(code))
        self._spawn_task(f"forget command {record.id}", self._forget(record.id))

    async def _forget(self, ident: int) -> None:
        with contextlib.suppress(OSError, ChannelClosedError):
            await self._client.forget(ident)

    def _on_lost(self, problem: Exception) -> None:
        for future in self._exits.values():
            if not future.done():
                future.set_exception(problem)


def find_user(pid: int, name: str) -> SandboxUser:
    """Look up a user in the sandbox's /etc/passwd, following no link out of its root."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        people = _table(root, "/etc/passwd", 7)
        groups = _table(root, "/etc/group", 4)
    finally:
        os.close(root)
    has_one_id = os.geteuid() != 0  # a rootless sandbox has uid 0 only
    for row in people:
        if name in (row[0], row[2]) and row[2].isdigit() and row[3].isdigit():
            if has_one_id:
                return SandboxUser(row[0], 0, 0, (), row[5] or "/", row[6])
            further = tuple(
                int(g[2]) for g in groups if row[0] in g[3].split(",") and g[2].isdigit()
            )
            return SandboxUser(
                row[0], int(row[2]), int(row[3]), further[:64], row[5] or "/", row[6]
            )
    if name == "root":
        return SandboxUser("root", 0, 0, (), "/", "/bin/sh")
    if is_id(name):
        uid = 0 if has_one_id else int(name)
        return SandboxUser(name, uid, 0, (), "/", "/bin/sh")
    raise InvalidError(f"user {name!r} does not exist in the sandbox's image")


def find_sandbox_shell(pid: int) -> str:
    """Return the shell of a sandbox; raise `InvalidError` if it has none."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        shell = find_shell(partial(syscalls.is_program_in_root, root))
    finally:
        os.close(root)
    if shell is None:
        raise InvalidError(NO_SHELL)
    return shell


def _table(root: int, path: str, columns: int) -> list[list[str]]:
    try:
        fd = syscalls.open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        text = file.read(_MAX_TABLE).decode(errors="replace")
    rows = (line.split(":") for line in text.splitlines())
    return [row for row in rows if len(row) == columns]
