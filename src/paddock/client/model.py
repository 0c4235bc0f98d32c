"""What a client asks of sandboxes, and what it gets."""

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from paddock.run_code.events import CodeError, CodeResult


class OpenSandbox(Struct, frozen=True):
    """A sandbox that runs, and what requests to it carry."""

    sandbox_id: str
    template: str = ""
    access_token: str = ""
    traffic_token: str = ""
    domain: str = ""


class KnownSandbox(Struct, frozen=True):
    """A sandbox in a list."""

    sandbox_id: str
    template: str
    state: str
    started_at: datetime
    ends_at: datetime
    metadata: Mapping[str, str]


class WantedSandbox(Struct, frozen=True, kw_only=True):
    """The request for a sandbox. It pauses at its end, and traffic resumes it."""

    template: str
    seconds: int
    metadata: Mapping[str, str] = {}
    env: Mapping[str, str] = {}
    idempotency_key: str = ""


class ShellCommand(Struct, frozen=True, kw_only=True):
    """A shell command line to run."""

    text: str
    seconds: float
    cwd: str | None = None
    env: Mapping[str, str] = {}


class CodeRun(Struct, frozen=True, kw_only=True):
    """Code to run in the interpreter of a sandbox."""

    code: str
    language: str
    seconds: float


class CodeOutcome(Struct):
    """The results of code so far."""

    values: list[CodeResult] = []
    fault: CodeError | None = None
    left_out: int = 0
    """Results that are too large, or too many."""
    kept_bytes: int = 0
    """Of the text and the images of the results."""


class FilePart(Struct, frozen=True):
    """A part of a file."""

    data: bytes
    size: int
    """Of the whole file."""


class FoundEntry(Struct, frozen=True):
    """An entry of a directory."""

    path: str
    kind: str
    """`file`, `directory` or `symlink`."""
    size: int


class StoredSnapshot(Struct, frozen=True):
    """A snapshot that sandboxes can be created from."""

    snapshot_id: str
    names: tuple[str, ...]


class Interrupted(Exception):  # noqa: N818 - not a failure: the output so far is kept
    """A command or code was stopped before its end; the message is the reason."""
