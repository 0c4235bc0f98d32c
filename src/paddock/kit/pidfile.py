"""A file that says which process runs here: the lock on it counts, not the number in it.

A number outlives its process and may come to name another; a lock goes with its holder.
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
    """Hold the file; `ConflictError` names the process that does already.

    Gives whether its last holder was killed: who ends in order leaves no number behind.
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
                # Somebody only looks who holds it, or has just begun to.
                time.sleep(_PAUSE_SECONDS)
        file.seek(0)
        was_killed = bool(file.read().strip())
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield was_killed
        finally:
            # Emptied, not unlinked: another may have opened it already to wait for the lock.
            file.truncate(0)


def holder(path: Path) -> int | None:
    """Give the process that holds the file, if one does."""
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
