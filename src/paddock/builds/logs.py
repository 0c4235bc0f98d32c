"""Logs of template builds: one file of JSON lines for each build.

Output of builds is not trusted: lines, bytes and the length of a line are bounded. The last entry
of a full log says so; warnings and errors still fit in a reserve. A line that a crash cut off is
removed before the next one is written.
"""

import errno
import itertools
import logging
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit import private_files
from paddock.kit.clock import Clock
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warn", "error")
MAX_BYTES = 4 << 20
MAX_LINES = 20_000
MAX_MESSAGE = 8 << 10
"""Characters of a message; the rest is cut off."""
_MARKED_LINES = 64
"""The position of every so many lines is kept, so that a reader does not read from the start."""
_RESERVE_BYTES = 256 << 10
"""Beyond `MAX_BYTES`, for warnings and errors."""
_UID = re.compile(r"^[A-Za-z0-9-]{1,128}$")
_SUFFIX = ".jsonl"


class BuildLogEntry(Struct, frozen=True, kw_only=True):
    """One entry of the log of a build."""

    timestamp: datetime
    level: str
    """One of `LEVELS`."""
    message: str
    step: str = ""
    """Number of the step from 1, `base` or `finalize`; empty if it concerns no step."""


_UNREADABLE = BuildLogEntry(
    timestamp=datetime.fromtimestamp(0, UTC), level="warn", message="(this line cannot be read)"
)


class _Size(Struct):
    """What the file of a build holds."""

    bytes: int = 0
    lines: int = 0
    is_full: bool = False
    marks: list[int] = []
    """Positions of the lines 0, `_MARKED_LINES`, …"""


class BuildLogs:
    """Appends to logs and reads them. One process writes. A build is named by its object's UID."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        *,
        max_bytes: int = MAX_BYTES,
        max_lines: int = MAX_LINES,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._sizes: dict[str, _Size] = {}
        self._failing: set[str] = set()
        """Builds whose last entry could not be written."""

    def append(self, uid: str, message: str, *, level: str = "info", step: str = "") -> None:
        """Append one entry. Nothing is written to a full log, or where the disk is full."""
        try:
            self._add(uid, message, level, step)
        except OSError as error:
            # A build does not fail because of its log.
            if uid not in self._failing:
                self._failing.add(uid)
                log.warning("build log was not written", extra=fields(build=uid, error=str(error)))

    def _add(self, uid: str, message: str, level: str, step: str) -> None:
        size = self._size(uid)
        matters = LEVELS.index(level) >= LEVELS.index("warn")
        if size.is_full and not (matters and size.bytes < self._max_bytes + _RESERVE_BYTES):
            return
        data = self._encoded(level, message, step)
        exceeds = size.bytes + len(data) > self._max_bytes or size.lines >= self._max_lines
        if exceeds and not size.is_full:
            size.is_full = True
            self._write(uid, size, self._encoded("warn", self._full_message(), step))
            if not matters:
                return
        self._write(uid, size, data)

    def read(
        self, uid: str, *, offset: int = 0, limit: int = 100, level: str = "debug"
    ) -> tuple[BuildLogEntry, ...]:
        """Return entries of this level and above, oldest first, from the entry `offset` on."""
        if level == LEVELS[0]:
            return tuple(map(_decoded, self._lines(uid, offset, limit)))
        # Messages have their quotation marks escaped: only the field looks like this.
        fields_of = [f'"level":"{name}"'.encode() for name in LEVELS[LEVELS.index(level) :]]
        lines = self._lines(uid, 0, sys.maxsize)
        found = (line for line in lines if any(field in line for field in fields_of))
        return tuple(map(_decoded, itertools.islice(found, offset, offset + limit)))

    def _lines(self, uid: str, offset: int, limit: int) -> list[bytes]:
        """Return lines of a log. Nothing is read where there are none, as polling clients ask."""
        if uid not in self._sizes and not self._path(uid).exists():
            return []
        size = self._size(uid)
        count = min(size.lines - offset, limit)
        if count <= 0:
            return []
        skipped = offset % _MARKED_LINES
        with self._path(uid).open("rb") as file:
            file.seek(size.marks[offset // _MARKED_LINES])
            return list(itertools.islice(file, skipped, skipped + count))

    def remove(self, uid: str) -> None:
        """Delete the log of a build; it may not exist."""
        self._sizes.pop(uid, None)
        self._failing.discard(uid)
        self._path(uid).unlink(missing_ok=True)

    def uids(self) -> frozenset[str]:
        """Return the UIDs of builds that have a log."""
        return frozenset(
            path.name.removesuffix(_SUFFIX) for path in self._directory.glob("*" + _SUFFIX)
        )

    def _encoded(self, level: str, message: str, step: str) -> bytes:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}… ({len(message) - MAX_MESSAGE} characters cut off)"
        entry = BuildLogEntry(timestamp=self._clock.now(), level=level, message=message, step=step)
        return msgspec.json.encode(entry) + b"\n"

    def _full_message(self) -> str:
        return (
            f"The log is full ({self._max_lines} lines or {self._max_bytes} bytes): "
            "further output is not stored."
        )

    def _write(self, uid: str, size: _Size, data: bytes) -> None:
        _append(self._path(uid), size.bytes, data)
        self._failing.discard(uid)
        if size.lines % _MARKED_LINES == 0:
            size.marks.append(size.bytes)
        size.bytes += len(data)
        size.lines += 1

    def _size(self, uid: str) -> _Size:
        """Return the size of a log; of one that an earlier process wrote, read it first."""
        if (known := self._sizes.get(uid)) is not None:
            return known
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, size = self._path(uid), _Size()
        if path.exists():
            content = path.read_bytes()
            end = content.rfind(b"\n") + 1
            if end < len(content):
                os.truncate(path, end)
            size = _Size(bytes=end, lines=content.count(b"\n"), marks=_marks(content[:end]))
            size.is_full = size.bytes > self._max_bytes or size.lines > self._max_lines
        self._sizes[uid] = size
        return size

    def _path(self, uid: str) -> Path:
        if not _UID.match(uid):
            raise ValueError(f"{uid!r} is not the UID of a build")
        return self._directory / f"{uid}{_SUFFIX}"


def _append(path: Path, position: int, data: bytes) -> None:
    """Write all of the data at the end of a file, which has this size, or none of it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags, private_files.MODE)
    try:
        written = os.write(descriptor, data)
        if written < len(data):
            os.ftruncate(descriptor, position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _marks(content: bytes) -> list[int]:
    """Return the positions of every line to mark."""
    lengths = (len(line) for line in content.splitlines(keepends=True))
    return [0, *itertools.accumulate(lengths)][:-1][::_MARKED_LINES]


def _decoded(line: bytes) -> BuildLogEntry:
    """Return an entry; one that a damaged disk left says so, so that offsets stay valid."""
    try:
        return msgspec.json.decode(line, type=BuildLogEntry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _UNREADABLE
