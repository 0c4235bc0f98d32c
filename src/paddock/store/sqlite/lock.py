"""The lock file beside the database, which names the process that holds it."""

import fcntl
import os
import sys
from pathlib import Path

from paddock.kit.errors import UnavailableError


class FileLock:
    """An exclusive lock, held from construction until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 400, 0).decode(errors="replace").strip()
            self._close()
            raise UnavailableError(
                f"the store {path.with_suffix('')} is in use by {holder or 'another process'}",
                hint="stop that process, or choose another data directory",
            ) from error
        program = " ".join(sys.argv)[:200] or sys.executable
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} ({program})\n".encode(), 0)
        # A forked child that outlives this process must not keep the lock.
        os.register_at_fork(after_in_child=self._close)

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            # Closing is not enough: a child forked just now shares the file and its lock until the
            # hook above has run in it.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
