"""One process at a time: a lock file beside the database that names its holder."""

import fcntl
import os
import sys
from pathlib import Path

from paddock.kit.errors import UnavailableError


class FileLock:
    """Held from its making to `release` or the end of the process, however it ends."""

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
        # A child that is forked and outlives us must not go on holding the lock for us.
        os.register_at_fork(after_in_child=self._close)

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            # Closing is not enough: a child forked a moment ago shares this file, and the lock with
            # it, until its own hook has run.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
