"""Pid files: the lock on the file counts, not the pid in it.

A pid outlives its process and may be reused; a lock ends with its holder.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

from paddock.kit.errors import ConflictError

_ATTEMPTS = 20
_PAUSE_SECONDS = 0.05


@contextlib.contextmanager
def lock(path: Path, *, what: str, hint: str) -> Generator[bool]:
    """Lock the file, or raise a `ConflictError` that names the process that holds it.

    Yields whether the last holder was killed: an orderly exit empties the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                file.seek(0)
                number = file.read().strip()
                if number or attempt == _ATTEMPTS - 1:
                    raise ConflictError(
                        f"{what} runs already (process {number})", hint=hint
                    ) from error
                # `holder` reads the file right now, or another process has just locked it.
                time.sleep(_PAUSE_SECONDS)
        file.seek(0)
        was_killed = bool(file.read().strip())
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield was_killed
        finally:
            # Emptied, not unlinked: another process may have opened it and wait for the lock.
            file.truncate(0)


def holder(path: Path) -> int | None:
    """Return the pid of the process that holds the file, or None."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdigit() else None
    except FileNotFoundError:
        return None
    return None
