"""Finds out whether a sandbox cannot be stored, or only not now.

CRIU attaches to every thread by ptrace. A thread that is already traced (`strace`, `gdb`) has its
one tracer: CRIU then waits until its timeout. Such threads are found before CRIU is started.
Other things are found by CRIU itself, within milliseconds: it ends with an error.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import PaddockError, UnstorableError

_TRANSIENT = (
    "no space left",
    "disk quota exceeded",
    "cannot allocate memory",
    "can't allocate",
    "out of memory",
    "input/output error",
    "too many open files",
    "timeout reached",
    "resource temporarily unavailable",
)
"""Parts of CRIU's errors that are about the machine, not about the sandbox. In lower case."""
_LOCATION = re.compile(r"Error \([\w/.-]+:\d+\):\s*")
_FAILED_PROCESS = re.compile(r"\(pid: (\d+)\) failed")
"""In a line that follows the cause. The number is that of the machine; users get that inside."""
HINT = "end that process or close that file, or pause with the strategy Freeze"


class TracedThread(Struct, frozen=True):
    """A thread that another process traces."""

    pid: int
    """Its id inside of the sandbox."""
    name: str
    tracer: int
    """Id of the tracer inside of the sandbox; 0 if it is outside."""
    tracer_name: str

    def __str__(self) -> str:
        by = f"process {self.tracer} ({self.tracer_name})" if self.tracer else "another process"
        return f"process {self.pid} ({self.name}) is traced by {by}"


def find_traced(threads: Iterable[int]) -> TracedThread | None:
    """Return the first of these threads that is traced. Freeze them first, so that it stays so."""
    for thread in threads:
        facts = _status_of(thread)
        tracer = int(facts.get("TracerPid", "0"))
        if tracer:
            return TracedThread(
                pid=_inner_id(facts),
                name=_name(facts),
                tracer=_inner_id(_status_of(tracer), outer=facts),
                tracer_name=_name(_status_of(tracer)),
            )
    return None


def require_untraced(uid: str, threads: Iterable[int]) -> None:
    """Raise `UnstorableError` if one of the threads of a sandbox is traced."""
    if (found := find_traced(threads)) is not None:
        raise UnstorableError(f"cannot store sandbox {uid}: {found}", hint=HINT)


def classified(error: PaddockError) -> PaddockError:
    """Return the error of a dump that CRIU refused: `UnstorableError`, unless it may pass."""
    lowered = error.message.lower()
    if any(part in lowered for part in _TRANSIENT):
        return error
    cause, *others = (_LOCATION.sub("", line).strip() for line in error.message.split(" | "))
    process = next((found for line in others if (found := _FAILED_PROCESS.search(line))), None)
    if process is None:
        return UnstorableError(error.message, hint=HINT)
    facts = _status_of(int(process[1]))
    who = f"process {_inner_id(facts)} ({_name(facts)})"
    return UnstorableError(f"{cause} [{who}]", hint=HINT)


def _status_of(thread: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{thread}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}  # It has ended since the list was read.
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _inner_id(facts: dict[str, str], outer: dict[str, str] | None = None) -> int:
    """Return the id in the innermost pid namespace; 0 if it is further out than `outer`."""
    numbers = facts.get("NSpid", "").split()
    if not numbers or (outer is not None and len(numbers) < len(outer["NSpid"].split())):
        return 0
    return int(numbers[-1])


def _name(facts: dict[str, str]) -> str:
    """Return the name of a process. It is chosen inside: only printable characters are kept."""
    name = facts.get("Name", "?")
    return "".join(char if char.isprintable() else "?" for char in name)[:32]
