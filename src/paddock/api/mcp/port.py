"""What the tools need of Paddock: the port of their use cases.

The tools know neither HTTP nor the manager. `client.sandboxes` implements the port over the public
APIs with the key of the client, so that rights, limits and the audit log apply to each call.
"""

from collections.abc import Mapping
from typing import Protocol

from paddock.client.model import (
    CodeOutcome,
    CodeRun,
    FilePart,
    FoundEntry,
    KnownSandbox,
    OpenSandbox,
    ShellCommand,
    StoredSnapshot,
    WantedSandbox,
)
from paddock.client.output import OutputTail


class SandboxCalls(Protocol):
    """The use cases of one client. All raise `PaddockError`; the key of the client decides."""

    async def create(self, wanted: WantedSandbox) -> OpenSandbox:
        """Create a sandbox. Equal idempotency keys return the same one while it exists."""
        ...

    async def connect(self, sandbox_id: str, *, seconds: int) -> OpenSandbox:
        """Resume a sandbox if it is paused; it ends no earlier than in `seconds`."""
        ...

    async def find(self, metadata: Mapping[str, str], *, state: str = "") -> list[KnownSandbox]:
        """Return the sandboxes with these metadata, oldest first."""
        ...

    async def pause(self, sandbox_id: str) -> None:
        """Pause a sandbox; one that is paused stays so."""
        ...

    async def kill(self, sandbox_id: str) -> None:
        """Kill a sandbox."""
        ...

    async def fork(self, sandbox_id: str, *, count: int, seconds: int) -> tuple[list[str], str]:
        """Clone a running sandbox; return the ids, and why others could not be created."""
        ...

    async def snapshot(self, sandbox_id: str, *, name: str | None) -> StoredSnapshot:
        """Store the state of a sandbox."""
        ...

    async def run_command(
        self, box: OpenSandbox, command: ShellCommand, out: OutputTail, err: OutputTail
    ) -> int:
        """Run a command line and return its exit code; `Interrupted` if it was stopped."""
        ...

    async def run_code(
        self, box: OpenSandbox, run: CodeRun, outcome: CodeOutcome, out: OutputTail, err: OutputTail
    ) -> None:
        """Run code and fill `outcome`; `Interrupted` if it was stopped."""
        ...

    async def read_file(self, box: OpenSandbox, path: str, *, offset: int, limit: int) -> FilePart:
        """Return up to `limit` bytes of a file."""
        ...

    async def write_file(self, box: OpenSandbox, path: str, data: bytes) -> None:
        """Write a file; its directories are created."""
        ...

    async def list_files(self, box: OpenSandbox, path: str, *, depth: int) -> list[FoundEntry]:
        """Return the entries of a directory, in the order of their paths."""
        ...

    def url(self, box: OpenSandbox, port: int) -> str:
        """Return the URL of a port of a sandbox."""
        ...
