"""Commands that the node itself runs in a sandbox: start and ready commands.

They go through the node's own channel to init, beside envd's. What a start command writes becomes
log lines; it is found again after the node was restarted.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
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
from paddock.kit.errors import InvalidError
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.sandbox.log_file import Journal

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READ = 65536
_MAX_PARTIAL = 8192
_MAX_TABLE = 1 << 20


SpawnTask = Callable[[str, Coroutine[Any, Any, None]], None]


class Person(Struct, frozen=True):
    """A user inside a sandbox."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


class Commands:
    """What the node runs in one sandbox."""

    def __init__(self, pidfd: int, pid: int, journal: Journal, spawn_task: SpawnTask) -> None:
        self._pid = pid
        self._spawn_task = spawn_task
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._readers: dict[int, tuple[str, bytearray]] = {}
        self._client = InitClient(
            take_channel(pidfd, fd=NODE_CHANNEL_FD), on_exit=self._ended, on_lost=self._lost
        )
        self._last = 0

    async def attach(self) -> None:
        """Find commands that an earlier node started."""
        for record in await self._client.attach():
            self._last = max(self._last, record.id)
            self._follow(record)
            if record.flags & RecordFlags.EXITED:
                await self._client.forget(record.id)

    async def begin(
        self, command: str, *, user: str, env: Mapping[str, str], cwd: str | None
    ) -> int:
        """Start a command that goes on by itself; its output becomes log lines."""
        record = await self._spawn(command, user=user, env=env, cwd=cwd)
        self._follow(record)
        return record.pid

    async def run(
        self, command: str, *, user: str, env: Mapping[str, str], cwd: str | None, timeout: float
    ) -> int:
        """Run a command to its end and give its exit status; beyond the timeout it is killed."""
        ended: asyncio.Future[int] = self._loop.create_future()
        record = await self._spawn(command, user=user, env=env, cwd=cwd, ended=ended)
        self._follow(record, keep=False)
        try:
            async with asyncio.timeout(timeout):
                return os.waitstatus_to_exitcode(await ended)
        except TimeoutError:
            await self._client.signal(record.id, signal.SIGKILL, SignalScope.TREE)
            return -signal.SIGKILL
        finally:
            self._exits.pop(record.id, None)

    def close(self) -> None:
        """Let go; commands go on."""
        for fd in list(self._readers):
            self._drop(fd)
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
        person = find_person(self._pid, user)
        self._last += 1
        if ended is not None:
            self._exits[self._last] = ended
        own = {"PATH": _PATH, "HOME": person.home, "USER": person.name, "LOGNAME": person.name}
        return await self._client.spawn(
            SpawnRequest(
                id=self._last,
                argv=["/bin/bash", "-l", "-c", command],
                env=own | dict(env),
                cwd=cwd or person.home,
                uid=person.uid,
                gid=person.gid,
                groups=person.groups,
                flags=SpawnFlags(0),
            )
        )

    def _follow(self, record: ProcessRecord, *, keep: bool = True) -> None:
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
                self._journal.write(
                    text, level="error" if name == "stderr" else "info", stream=name
                )
        if not data:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._readers.pop(fd, None)
        os.close(fd)

    def _ended(self, record: ProcessRecord) -> None:
        future = self._exits.get(record.id)
        if future is not None and not future.done():
            future.set_result(record.wait_status)
        elif future is None:
            code = os.waitstatus_to_exitcode(record.wait_status)
            self._journal.write("start command ended", level="info", exit_code=str(code))
        self._spawn_task(f"forget command {record.id}", self._forget(record.id))

    async def _forget(self, ident: int) -> None:
        with contextlib.suppress(OSError, ChannelClosedError):
            await self._client.forget(ident)

    def _lost(self, problem: Exception) -> None:
        for future in self._exits.values():
            if not future.done():
                future.set_exception(problem)


def find_person(pid: int, name: str) -> Person:
    """Look a user up in the sandbox's own tables, following no link out of it."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        people = _table(root, "/etc/passwd", 7)
        groups = _table(root, "/etc/group", 4)
    finally:
        os.close(root)
    has_one_id = os.geteuid() != 0  # then a sandbox has root's only
    for row in people:
        if name in (row[0], row[2]) and row[2].isdigit() and row[3].isdigit():
            if has_one_id:
                return Person(row[0], 0, 0, (), row[5] or "/", row[6])
            further = tuple(
                int(g[2]) for g in groups if row[0] in g[3].split(",") and g[2].isdigit()
            )
            return Person(row[0], int(row[2]), int(row[3]), further[:64], row[5] or "/", row[6])
    if name == "root":
        return Person("root", 0, 0, (), "/", "/bin/sh")
    raise InvalidError(f"there is no user {name!r} in the sandbox's image")


def _table(root: int, path: str, columns: int) -> list[list[str]]:
    try:
        fd = syscalls.open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        text = file.read(_MAX_TABLE).decode(errors="replace")
    rows = (line.split(":") for line in text.splitlines())
    return [row for row in rows if len(row) == columns]
