"""Where the lines of the audit log are written: rotated files, or a stream.

Lines are handed to the kernel, whole, before `write` returns; there is no fsync. Each process
writes to files of its own: `audit-0.log`, and `audit-0.log.1` and so on for older ones. A second
process in the same directory uses `audit-1.log`. Files and directory are for their owner only.
"""

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path
from typing import Protocol

MAX_PROCESSES = 16
"""How many processes can write to one directory."""
NAME = re.compile(r"audit-(\d+)\.log(?:\.(\d+))?")
"""Process and age of a file."""


class AuditSink(Protocol):
    """Takes the lines of the audit log."""

    def write(self, data: bytes) -> None:
        """Write whole lines, or raise `OSError` and write nothing."""
        ...

    def check(self) -> None:
        """Look, at intervals, whether the destination is still there."""
        ...

    def close(self) -> None:
        """Write no more."""
        ...


class AuditStream:
    """Writes lines to a descriptor, such as standard output."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        """Write whole lines. A pipe may take them in parts."""
        while data:
            data = data[os.write(self._descriptor, data) :]

    def check(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Leave the descriptor open: it belongs to the process."""


class AuditFiles:
    """Writes lines to the newest of a bounded number of files of bounded size."""

    def __init__(self, directory: Path, *, max_bytes: int, count: int) -> None:
        """Keep `count` files of up to `max_bytes` each."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._count = count
        self._path: Path | None = None
        self._lock = -1
        self._file = -1
        self._size = 0

    def write(self, data: bytes) -> None:
        """Write whole lines, or raise `OSError` and write nothing."""
        if self._file < 0:
            self._open()
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        try:
            written = os.write(self._file, data)
            if written < len(data):
                # The rest does not fit: a part of a line would hide the next one.
                os.ftruncate(self._file, self._size)
        except OSError:
            self._close_file()
            raise
        if written < len(data):
            self._close_file()  # Deleting the file must free its space.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += written

    def check(self) -> None:
        """Close the file if it was moved or deleted; the next line creates a new one."""
        if self._file < 0 or self._path is None:
            return
        try:
            is_same = os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            is_same = False
        if not is_same:
            self._close_file()

    def close(self) -> None:
        """Close the file and let another process use it."""
        self._close_file()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._path = None

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path = self._path or self._acquire()
        self._delete_surplus(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path, flags, 0o600)
        try:
            os.fchmod(file, 0o600)
            self._size = os.fstat(file).st_size
            if self._size and os.pread(file, 1, self._size - 1) != b"\n":
                # The last line was cut off by a crash.
                self._size += os.write(file, b"\n")
        except OSError:
            os.close(file)
            raise
        self._file = file

    def _acquire(self) -> Path:
        """Return the path of the first file that no other process writes to, and lock it."""
        for number in range(MAX_PROCESSES):
            path = self._directory / f"audit-{number}.log"
            # The file itself cannot carry the lock: it is renamed.
            lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock = lock
            return path
        raise OSError(errno.EBUSY, "too many processes write here", str(self._directory))

    def _rotate(self) -> None:
        path = self._path
        if path is None:
            return
        self._close_file()
        for age in range(self._count - 1, 0, -1):
            newer = path if age == 1 else path.with_name(f"{path.name}.{age - 1}")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(path.with_name(f"{path.name}.{age}"))
        if self._count == 1:
            path.unlink(missing_ok=True)
        self._open()

    def _delete_surplus(self, path: Path) -> None:
        """Delete files beyond the number that is kept, which may have been lowered."""
        for other in path.parent.glob(f"{path.name}.*"):
            match = NAME.fullmatch(other.name)
            if match is not None and match[2] is not None and int(match[2]) >= self._count:
                other.unlink(missing_ok=True)
