"""How envd gets commands run: the `Spawner` port.

`spawner_init` asks the sandbox's pid 1 over its channel, so that commands live in the sandbox's
process tree and survive envd. `spawner_direct` forks here: for pods entered with nsenter, for the
host mode of tasks, and for tests. Neither knows about subscribers, tags or deadlines.
"""

import errno
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from paddock.envd.process.init_protocol import SignalScope

OOM_SCORE_ADJ = 100
_WANTING = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC))


class SpawnError(Exception):
    """The command could not be started; the message says why, for people."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.is_resource_exhausted = number in _WANTING
        """There are too many processes or too little memory: later it may go well."""


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


class ChildProcess(Protocol):
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

    async def signal(self, number: int, scope: SignalScope = SignalScope.PROCESS) -> None:
        """Signal it; one that is gone is no error."""
        ...

    async def close_stdin(self) -> None:
        """Make it see end-of-file, once the holder has closed its own copy."""
        ...

    async def wait_responsive(self) -> None:
        """Return once its parent answers: at once, or when a paused sandbox goes on."""
        ...

    async def forget(self) -> None:
        """Let go of what is kept of an ended process."""
        ...


class Survivor(Struct, frozen=True):
    """A process found running (or ended) by a new envd."""

    child: ChildProcess
    memo: bytes
    exit: ExitStatus | None


class Spawner(Protocol):
    """Starts commands. Every `on_exit` is called exactly once, from the event loop."""

    async def attach(self, on_exit: Callable[[int], OnExit]) -> list[Survivor]:
        """Find what an earlier envd left; `on_exit(pid)` gives the callback for each."""
        ...

    async def spawn(self, command: Command, on_exit: OnExit) -> ChildProcess:
        """Start a command, or raise `SpawnError`."""
        ...

    def close(self) -> None:
        """Let go of everything, without ending any process."""
        ...
