"""Starts commands as children of envd itself; they cannot be found again after a restart."""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from types import FrameType

from paddock.envd.process.init_protocol import SignalScope
from paddock.envd.process.spawner import (
    OOM_SCORE_ADJ,
    Command,
    ExitStatus,
    InheritedProcess,
    OnExit,
    SpawnedProcess,
    Spawner,
    SpawnError,
)
from paddock.envd.process.tree import find_members, kill_all, signal_all

_MAX_OOM_SCORE_ADJ = 1000
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class _DirectChild:
    """A command whose parent is this process."""

    def __init__(self, pid: int, outputs: Mapping[str, int]) -> None:
        self.pid = pid
        self.stdin: int | None = None
        self.outputs = outputs
        self.is_reaped = False

    async def signal(self, number: int, scope: SignalScope = SignalScope.PROCESS) -> None:
        with contextlib.suppress(ProcessLookupError):
            if scope is SignalScope.TREE and number == signal.SIGKILL:
                kill_all(self.pid)
            elif scope is SignalScope.TREE:
                signal_all(find_members(self.pid), number)
            elif not self.is_reaped:
                os.kill(self.pid, number)

    async def close_stdin(self) -> None:
        """Do nothing: this process held the only write end."""

    async def wait_responsive(self) -> None:
        """Do nothing: this process is the parent."""

    async def forget(self) -> None:
        """Do nothing: no state is kept."""


class DirectSpawner:
    """Forks commands in this process's own tree."""

    def __init__(self, *, switch_user: bool = True) -> None:
        self._switch_user = switch_user and os.geteuid() == 0
        self._pidfds: set[int] = set()
        _stop_ignoring_signals()

    async def attach(self, on_exit: Callable[[int], OnExit]) -> list[InheritedProcess]:
        """Return nothing: children of an earlier process cannot be found again."""
        return []

    async def spawn(self, command: Command, on_exit: OnExit) -> SpawnedProcess:
        """Fork and exec in a new session."""
        try:
            ours, theirs = _open_streams(command)
        except OSError as error:
            raise SpawnError(f"cannot run {command.argv[0]!r}: {error}", error.errno) from error
        uid, gid, groups = command.uid, command.gid, list(command.groups)
        try:
            with _raised_oom_score():
                popen = subprocess.Popen(  # noqa: ASYNC220 - vfork and exec, no waiting
                    command.argv,
                    stdin=theirs[0],
                    stdout=theirs[1],
                    stderr=theirs[2],
                    cwd=command.cwd,
                    env=command.env,
                    start_new_session=True,
                    umask=0o022,
                    preexec_fn=_set_controlling_terminal if command.pty_size else None,
                    user=uid if self._switch_user else None,
                    group=gid if self._switch_user else None,
                    extra_groups=groups if self._switch_user else None,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _close(fd for fd in ours.values() if fd is not None)
            number = error.errno if isinstance(error, OSError) else None
            raise SpawnError(f"cannot run {command.argv[0]!r}: {error}", number) from error
        finally:
            _close(set(theirs))
        popen.returncode = 0  # the object must not wait: `_watch` does, by pidfd
        outputs = {k: fd for k, fd in ours.items() if fd is not None and k != "stdin"}
        child = _DirectChild(popen.pid, outputs)
        child.stdin = ours["stdin"]
        self._watch(child, on_exit)
        return child

    def close(self) -> None:
        """Stop waiting for children; they keep running."""
        loop = asyncio.get_running_loop()
        for pidfd in self._pidfds:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _watch(self, child: _DirectChild, on_exit: OnExit) -> None:
        pidfd = os.pidfd_open(child.pid)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._pidfds.discard(pidfd)
            child.is_reaped = True
            _, status = os.waitpid(child.pid, 0)
            on_exit(ExitStatus.from_wait(status))

        self._pidfds.add(pidfd)
        loop.add_reader(pidfd, ended)


def _open_streams(command: Command) -> tuple[dict[str, int | None], tuple[int, int, int]]:
    """Return our ends by name, and the three ends of the command."""
    opened: list[int] = []
    try:
        return _make_streams(command, opened)
    except OSError:
        _close(opened)
        raise


def _make_streams(
    command: Command, opened: list[int]
) -> tuple[dict[str, int | None], tuple[int, int, int]]:
    if command.pty_size is not None:
        columns, rows = command.pty_size
        master, slave = os.openpty()
        opened += (master, slave)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.set_blocking(master, False)
        return {"stdin": None, "pty": master}, (slave, slave, slave)
    out_read, out_write = os.pipe()
    opened += (out_read, out_write)
    error_read, error_write = os.pipe()
    opened += (error_read, error_write)
    ours: dict[str, int | None] = {"stdin": None, "stdout": out_read, "stderr": error_read}
    if command.has_stdin:
        theirs_in, ours["stdin"] = os.pipe()
    else:
        theirs_in = os.open("/dev/null", os.O_RDONLY)
    for fd in ours.values():
        if fd is not None:
            os.set_blocking(fd, False)
    return ours, (theirs_in, out_write, error_write)


def _stop_ignoring_signals() -> None:
    """Replace ignored signals (`nohup`) by a handler, so that commands receive every signal.

    An ignored signal stays ignored across exec; a handler does not.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # handlers can be set in the main thread only
    for number in signal.valid_signals():
        # Python itself ignores two more and restores them in children.
        if signal.getsignal(number) is signal.SIG_IGN and number not in _IGNORED_BY_PYTHON:
            signal.signal(number, _ignore_signal)


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Do nothing, as if the signal were ignored."""


@contextlib.contextmanager
def _raised_oom_score() -> Generator[None]:
    """Raise our own OOM score while forking, so that the OOM killer takes commands before envd.

    The child inherits it: set later, the child could already have forked.
    """
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no /proc, or a read-only one
        yield
        return
    try:
        own = int(os.read(fd, 16))
        os.pwrite(fd, b"%d" % min(own + OOM_SCORE_ADJ, _MAX_OOM_SCORE_ADJ), 0)
        try:
            yield
        finally:
            os.pwrite(fd, b"%d" % own, 0)
    finally:
        os.close(fd)


def _set_controlling_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


_: type[Spawner] = DirectSpawner
