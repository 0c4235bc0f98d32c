"""How envd gets commands run: the `Spawner` port and its two implementations.

`InitSpawner` asks the sandbox's pid 1 over its channel, so that commands live in the sandbox's
process tree and survive envd. `DirectSpawner` forks here: for pods entered with nsenter, for the
host mode of tasks, and for tests. Neither knows about subscribers, tags or deadlines.
"""

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import signal
import socket
import struct
import subprocess
import termios
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from paddock.envd import initproto
from paddock.envd.initproto import Scope
from paddock.envd.tasks_tree import kill_all, members, signal_all

OOM_SCORE_ADJ = 100
_MOST_EXPENDABLE = 1000


class SpawnError(Exception):
    """The command could not be started; the message says why, for people."""


class SandboxGoneError(Exception):
    """Nothing can be started or signalled any more: the sandbox ended."""


class Command(Struct, frozen=True, kw_only=True):
    """A command ready to run: user resolved, environment complete."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    pty_size: tuple[int, int] | None = None
    """Columns and rows; `None` means pipes."""
    has_stdin: bool = True
    memo: bytes = b""
    """Whatever the caller wants to find again after its own restart."""


class ExitStatus(Struct, frozen=True):
    """How a process ended: exactly one of the two is meant."""

    code: int
    signal: int = 0
    is_core_dumped: bool = False

    @staticmethod
    def from_wait(status: int) -> "ExitStatus":
        """Read a wait status."""
        if os.WIFSIGNALED(status):
            return ExitStatus(-1, os.WTERMSIG(status), os.WCOREDUMP(status))
        return ExitStatus(os.WEXITSTATUS(status))


OnExit = Callable[[ExitStatus], None]


class Child(Protocol):
    """A started command. Its descriptors are non-blocking and belong to the holder."""

    @property
    def pid(self) -> int:
        """Process id as seen inside the sandbox."""
        ...

    @property
    def stdin(self) -> int | None:
        """Write end of standard input."""
        ...

    @property
    def outputs(self) -> Mapping[str, int]:
        """Read ends, by `stdout`, `stderr` or `pty` (which is also written to)."""
        ...

    async def signal(self, number: int, scope: Scope = Scope.PROCESS) -> None:
        """Signal it; one that is gone is no error."""
        ...

    async def close_stdin(self) -> None:
        """Make it see end-of-file, once the holder has closed its own copy."""
        ...

    async def answer(self) -> None:
        """Return once its parent answers: at once, or when a paused sandbox goes on."""
        ...

    async def forget(self) -> None:
        """Let go of what is kept of an ended process."""
        ...


class Survivor(Struct, frozen=True):
    """A process found running (or ended) by a new envd."""

    child: Child
    memo: bytes
    exit: ExitStatus | None


class Spawner(Protocol):
    """Starts commands. Every `on_exit` is called exactly once, from the event loop."""

    async def attach(self, on_exit: Callable[[int], OnExit]) -> list[Survivor]:
        """Find what an earlier envd left; `on_exit(pid)` gives the callback for each."""
        ...

    async def spawn(self, command: Command, on_exit: OnExit) -> Child:
        """Start a command, or raise `SpawnError`."""
        ...

    def close(self) -> None:
        """Let go of everything, without ending any process."""
        ...


# -- through init ------------------------------------------------------------------------------


class _InitChild:
    """A command whose parent is init."""

    def __init__(self, client: initproto.InitClient, record: initproto.Record) -> None:
        self._client = client
        self._id = record.id
        self.pid = record.pid
        self.stdin = record.stdin
        named = {"stdout": record.stdout, "stderr": record.stderr, "pty": record.pty}
        self.outputs: Mapping[str, int] = {k: fd for k, fd in named.items() if fd is not None}
        for fd in record.fds:
            os.set_blocking(fd, False)

    async def signal(self, number: int, scope: Scope = Scope.PROCESS) -> None:
        try:
            await self._client.signal(self._id, number, scope)
        except ProcessLookupError:
            return
        except initproto.InitError as error:
            if error.errno != 3:  # ESRCH: it ended meanwhile
                raise
        except initproto.ChannelClosedError as error:
            raise SandboxGoneError(str(error)) from error

    async def close_stdin(self) -> None:
        with contextlib.suppress(initproto.InitError, initproto.ChannelClosedError):
            await self._client.close_stdin(self._id)

    async def answer(self) -> None:
        try:
            await self._client.ping()
        except initproto.ChannelClosedError as error:
            raise SandboxGoneError(str(error)) from error

    async def forget(self) -> None:
        with contextlib.suppress(initproto.InitError, initproto.ChannelClosedError):
            await self._client.forget(self._id)


class InitSpawner:
    """Asks the sandbox's pid 1."""

    def __init__(
        self, channel: socket.socket, on_lost: Callable[[Exception], None] | None = None
    ) -> None:
        self._client = initproto.InitClient(channel, on_exit=self._on_exit_record, on_lost=on_lost)
        self._ids = itertools.count(1)
        self._exits: dict[int, OnExit] = {}

    async def attach(self, on_exit: Callable[[int], OnExit]) -> list[Survivor]:
        """Take over the channel and what runs behind it."""
        survivors: list[Survivor] = []
        highest = 0
        for record in await self._client.attach():
            highest = max(highest, record.id)
            ended: ExitStatus | None = None
            if record.flags & initproto.RecordFlags.EXITED:
                ended = ExitStatus.from_wait(record.wait_status)
            else:
                self._exits[record.id] = on_exit(record.pid)
            survivors.append(Survivor(_InitChild(self._client, record), record.memo, ended))
        self._ids = itertools.count(highest + 1)
        return survivors

    async def spawn(self, command: Command, on_exit: OnExit) -> Child:
        """Have init fork and exec."""
        flags = initproto.SpawnFlags(0)
        columns, rows = command.pty_size or (80, 24)
        if command.pty_size is not None:
            flags |= initproto.SpawnFlags.PTY
        elif command.has_stdin:
            flags |= initproto.SpawnFlags.STDIN_PIPE
        ident = next(self._ids)
        request = initproto.SpawnRequest(
            id=ident, argv=command.argv, env=command.env, cwd=command.cwd, uid=command.uid,
            gid=command.gid, groups=command.groups, flags=flags, rows=rows, cols=columns,
            oom_score_adj=OOM_SCORE_ADJ, memo=command.memo,
        )  # fmt: skip
        self._exits[ident] = on_exit
        try:
            record = await self._client.spawn(request)
        except initproto.InitError as error:
            self._exits.pop(ident, None)
            raise SpawnError(_explain(command, error)) from error
        except (initproto.ChannelClosedError, initproto.ProtocolError) as error:
            self._exits.pop(ident, None)
            raise SandboxGoneError(str(error)) from error
        return _InitChild(self._client, record)

    def close(self) -> None:
        """Drop our end of the channel."""
        self._client.close()

    def _on_exit_record(self, record: initproto.Record) -> None:
        if (on_exit := self._exits.pop(record.id, None)) is not None:
            on_exit(ExitStatus.from_wait(record.wait_status))


def _explain(command: Command, error: initproto.InitError) -> str:
    if error.errno == errno.EAGAIN and error.stage in (initproto.Stage.FORK, initproto.Stage.EXEC):
        return (
            f"cannot start {command.argv[0]!r}: the sandbox has as many processes as it may have; "
            "kill some of its commands, or the sandbox, or give its template more `pids`"
        )
    if error.stage is initproto.Stage.EXEC:
        return f"cannot run {command.argv[0]!r}: {error.strerror}"
    if error.stage is initproto.Stage.DIRECTORY:
        return f"cannot enter directory {command.cwd!r}: {error.strerror}"
    return f"cannot start {command.argv[0]!r} ({error.stage.name.lower()}): {error.strerror}"


# -- directly ----------------------------------------------------------------------------------


class _DirectChild:
    """A command whose parent is this process."""

    def __init__(self, pid: int, outputs: Mapping[str, int]) -> None:
        self.pid = pid
        self.stdin: int | None = None
        self.outputs = outputs
        self.is_reaped = False

    async def signal(self, number: int, scope: Scope = Scope.PROCESS) -> None:
        with contextlib.suppress(ProcessLookupError):
            if scope is Scope.TREE and number == signal.SIGKILL:
                kill_all(self.pid)
            elif scope is Scope.TREE:
                signal_all(members(self.pid), number)
            elif scope is Scope.GROUP:
                os.killpg(self.pid, number)
            elif not self.is_reaped:
                os.kill(self.pid, number)

    async def close_stdin(self) -> None:
        """Nobody else holds the write end."""

    async def answer(self) -> None:
        """We are its parent."""

    async def forget(self) -> None:
        """Nothing is kept."""


class DirectSpawner:
    """Forks in this process's own tree."""

    def __init__(self, *, switch_user: bool = True) -> None:
        self._switch_user = switch_user and os.geteuid() == 0
        self._watched: set[int] = set()

    async def attach(self, on_exit: Callable[[int], OnExit]) -> list[Survivor]:
        """Children of an earlier process cannot be found again."""
        return []

    async def spawn(self, command: Command, on_exit: OnExit) -> Child:
        """Fork and exec here, in a session of its own."""
        mine, theirs = _streams(command)
        uid, gid, groups = command.uid, command.gid, list(command.groups)
        try:
            popen = subprocess.Popen(  # noqa: ASYNC220 - vfork and exec, no waiting
                command.argv,
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2],
                cwd=command.cwd,
                env=command.env,
                start_new_session=True,
                umask=0o022,
                preexec_fn=_own_terminal if command.pty_size else None,
                user=uid if self._switch_user else None,
                group=gid if self._switch_user else None,
                extra_groups=groups if self._switch_user else None,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _close(fd for fd in mine.values() if fd is not None)
            raise SpawnError(f"cannot run {command.argv[0]!r}: {error}") from error
        finally:
            _close(set(theirs))
        popen.returncode = 0  # the object must not wait: we do, by pidfd
        _make_expendable(popen.pid)
        outputs = {k: fd for k, fd in mine.items() if fd is not None and k != "stdin"}
        child = _DirectChild(popen.pid, outputs)
        child.stdin = mine["stdin"]
        self._watch(child, on_exit)
        return child

    def close(self) -> None:
        """Stop waiting for children."""
        loop = asyncio.get_running_loop()
        for pidfd in self._watched:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()

    def _watch(self, child: _DirectChild, on_exit: OnExit) -> None:
        pidfd = os.pidfd_open(child.pid)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._watched.discard(pidfd)
            child.is_reaped = True
            _, status = os.waitpid(child.pid, 0)
            on_exit(ExitStatus.from_wait(status))

        self._watched.add(pidfd)
        loop.add_reader(pidfd, ended)


def _streams(command: Command) -> tuple[dict[str, int | None], tuple[int, int, int]]:
    """Give our ends by name, and the three the command gets."""
    if command.pty_size is not None:
        columns, rows = command.pty_size
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.set_blocking(master, False)
        return {"stdin": None, "pty": master}, (slave, slave, slave)
    out_read, out_write = os.pipe()
    error_read, error_write = os.pipe()
    mine: dict[str, int | None] = {"stdin": None, "stdout": out_read, "stderr": error_read}
    if command.has_stdin:
        theirs_in, mine["stdin"] = os.pipe()
    else:
        theirs_in = os.open("/dev/null", os.O_RDONLY)
    for fd in mine.values():
        if fd is not None:
            os.set_blocking(fd, False)
    return mine, (theirs_in, out_write, error_write)


def _make_expendable(pid: int) -> None:
    """Out of memory, a command goes before us, however expendable we are ourselves."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj") as ours,
        open(f"/proc/{pid}/oom_score_adj", "w") as file,
    ):
        file.write(str(min(int(ours.read()) + OOM_SCORE_ADJ, _MOST_EXPENDABLE)))


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
