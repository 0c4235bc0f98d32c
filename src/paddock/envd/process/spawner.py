"""The `Spawner` port, through which envd starts commands.

`init_spawner.py` sends requests to the sandbox's pid 1, so that commands belong to the sandbox's
process tree and survive envd. `direct_spawner.py` forks in envd: for pods entered with nsenter, for
the host mode of tasks, and for tests. Subscribers, tags and deadlines are in `registry.py`.
"""

import errno
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from paddock.envd.process.init_protocol import SignalScope

OOM_SCORE_ADJ = 100
_RESOURCE_ERRNOS = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC))


class SpawnError(Exception):
    """The command could not be started; the message is for people."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.is_resource_exhausted = number in _RESOURCE_ERRNOS
        """Processes, descriptors, memory or disk are exhausted: a retry may succeed."""


class SandboxGoneError(Exception):
    """The sandbox has ended: nothing can be started or signalled any more."""


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
    """Opaque data that `attach` returns after a restart of the caller."""


class ExitStatus(Struct, frozen=True):
    """How a process ended: by exit code, or by signal if that is not 0."""

    code: int
    signal: int = 0
    is_core_dumped: bool = False

    @staticmethod
    def from_wait(status: int) -> "ExitStatus":
        """Decode a wait status."""
        if os.WIFSIGNALED(status):
            return ExitStatus(-1, os.WTERMSIG(status), os.WCOREDUMP(status))
        return ExitStatus(os.WEXITSTATUS(status))


OnExit = Callable[[ExitStatus], None]


class SpawnedProcess(Protocol):
    """A started command. Its descriptors are non-blocking; the caller must close them."""

    @property
    def pid(self) -> int:
        """The process id inside the sandbox."""
        ...

    @property
    def stdin(self) -> int | None:
        """The write end of standard input."""
        ...

    @property
    def outputs(self) -> Mapping[str, int]:
        """The read ends by name: `stdout`, `stderr` or `pty` (which is also written to)."""
        ...

    async def signal(self, number: int, scope: SignalScope = SignalScope.PROCESS) -> None:
        """Send a signal; a process that has ended is no error."""
        ...

    async def close_stdin(self) -> None:
        """Make the process read end-of-file, after the caller has closed its own copy."""
        ...

    async def wait_responsive(self) -> None:
        """Return once the parent responds: at once, or when a paused sandbox is resumed."""
        ...

    async def forget(self) -> None:
        """Release what is kept of an ended process."""
        ...


class InheritedProcess(Struct, frozen=True):
    """A process, running or ended, that an earlier envd started."""

    child: SpawnedProcess
    memo: bytes
    exit: ExitStatus | None


class Spawner(Protocol):
    """Starts commands. Every `on_exit` is called exactly once, from the event loop."""

    async def attach(self, on_exit: Callable[[int], OnExit]) -> list[InheritedProcess]:
        """Return the processes of an earlier envd; `on_exit(pid)` returns the callback of each."""
        ...

    async def spawn(self, command: Command, on_exit: OnExit) -> SpawnedProcess:
        """Start a command, or raise `SpawnError`."""
        ...

    def close(self) -> None:
        """Release all resources; processes keep running."""
        ...
