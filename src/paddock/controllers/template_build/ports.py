"""What a build needs of a sandbox: to run commands and to copy files into it."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from paddock.kit.errors import PaddockError
from paddock.resources.kinds.sandbox import Sandbox

OnOutput = Callable[[str, bytes], Awaitable[None]]
"""Gets the stream, `stdout` or `stderr`, and a piece of output. While it waits, no more is read,
and the command waits to write."""


class CommandRefusedError(PaddockError):
    """A command could not be started, or files could not be copied, for a reason in the build."""

    def __init__(self, message: str, *, is_unknown_user: bool = False) -> None:
        super().__init__(message)
        self.is_unknown_user = is_unknown_user


class BuildCommand(Struct, frozen=True, kw_only=True):
    """A command line of a build."""

    text: str
    user: str
    env: Mapping[str, str] = {}
    workdir: str | None = None
    """`None`: the home directory of the user."""
    seconds: float = 3600.0


class CopyFiles(Struct, frozen=True, kw_only=True):
    """Files of an archive that are to be copied."""

    archive: Path
    source: str
    destination: str
    owner: str
    """`user[:group]`; empty: the user."""
    mode: str
    """Octal; empty: as in the archive."""
    user: str
    workdir: str | None = None


class BuildShell(Protocol):
    """Calls envd of the sandbox of a build. `UnavailableError` if it does not answer."""

    async def run(self, sandbox: Sandbox, command: BuildCommand, on_output: OnOutput) -> int:
        """Run a command and return its exit status; `CommandRefusedError`,
        `DeadlineExceededError`."""
        ...

    async def copy(self, sandbox: Sandbox, files: CopyFiles) -> None:
        """Copy files; `CommandRefusedError`."""
        ...

    async def make_directory(self, sandbox: Sandbox, path: str, *, user: str) -> None:
        """Create a directory and its parents unless they exist, as this user's."""
        ...
