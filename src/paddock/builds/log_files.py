"""The files of build logs: one of JSON lines for each build. Everything here blocks.

Output of builds is not trusted: lines, bytes and the length of a line are bounded. The last entry
of a full log says so; warnings and errors still fit in a reserve. A line that a crash cut off is
removed before the next one is written.
"""

import bisect
import contextlib
import errno
import itertools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit import private_files
from paddock.kit.errors import DiskFullError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warn", "error")
MAX_BYTES = 4 << 20
MAX_LINES = 20_000
MAX_MESSAGE = 8 << 10
"""Characters of a message; the rest is cut off."""
RESERVE_BYTES = 256 << 10
"""Beyond `MAX_BYTES`, for warnings and errors."""
_MARKED_LINES = 64
"""The position of every so many lines is kept, so that a reader does not read from the start."""
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


class NewEntry(Struct, frozen=True):
    """An entry that is to be written."""

    data: bytes
    timestamp: datetime
    step: str
    matters: bool
    """Whether it is a warning or an error."""

    @staticmethod
    def of(timestamp: datetime, level: str, message: str, step: str) -> "NewEntry":
        """Return an entry; a long message is cut off."""
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}… ({len(message) - MAX_MESSAGE} characters cut off)"
        entry = BuildLogEntry(timestamp=timestamp, level=level, message=message, step=step)
        return NewEntry(msgspec.json.encode(entry) + b"\n", timestamp, step, matters(level))


class _Size(Struct):
    """What the file of a build holds."""

    bytes: int = 0
    lines: int = 0
    is_full: bool = False
    marks: list[int] = []
    """Positions of the lines 0, `_MARKED_LINES`, …"""


class LogFiles:
    """The logs below one directory. Threads take turns; `is_full` does not wait."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        max_lines: int,
        ensure_room: Callable[[str, int], None] | None = None,
    ) -> None:
        """`ensure_room` raises `DiskFullError` if the disk has no room for so many bytes."""
        self._directory = directory
        self._ensure_room = ensure_room
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._sizes: dict[str, _Size] = {}
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        """Builds whose last entries could not be written."""

    def is_full(self, uid: str) -> bool:
        """Whether a log is known to be full."""
        return (size := self._sizes.get(uid)) is not None and size.is_full

    def write(self, logs: Mapping[str, Sequence[NewEntry]]) -> None:
        """Append entries to logs. Nothing is written to a full log, or into the disk's reserve."""
        for uid, entries in logs.items():
            try:
                with self._lock:
                    self._append(uid, entries)
                self._failing.discard(uid)
            except (OSError, DiskFullError) as error:
                # A build does not fail because of its log.
                if uid not in self._failing:
                    self._failing.add(uid)
                    log.warning(
                        "build log was not written", extra=fields(build=uid, error=str(error))
                    )

    def read(self, uid: str, offset: int, limit: int, level: str) -> tuple[BuildLogEntry, ...]:
        """Return entries of this level and above, oldest first, from the entry `offset` on."""
        if level == LEVELS[0]:
            return tuple(map(_decoded, self._lines(uid, offset, limit)))
        found = _of_level(self._lines(uid, 0, sys.maxsize), level)
        return tuple(map(_decoded, itertools.islice(found, offset, offset + limit)))

    def page(
        self, uid: str, cursor: datetime | None, limit: int, level: str, backward: bool
    ) -> tuple[BuildLogEntry, ...]:
        """Return entries from a time on; or those before it, newest first.

        Entries are in the order of their times, unless the clock of the machine was set back.
        """
        lines = list(_of_level(self._lines(uid, 0, sys.maxsize), level))
        start = len(lines) if backward else 0
        if cursor is not None:
            start = bisect.bisect_left(lines, cursor, key=lambda line: _decoded(line).timestamp)
        if backward:
            return tuple(map(_decoded, reversed(lines[max(start - limit, 0) : start])))
        return tuple(map(_decoded, lines[start : start + limit]))

    def remove(self, uid: str) -> None:
        """Delete the log of a build; it may not exist."""
        with self._lock:
            self._sizes.pop(uid, None)
            self._failing.discard(uid)
            self._path(uid).unlink(missing_ok=True)

    def uids(self) -> frozenset[str]:
        """Return the UIDs of builds that have a log."""
        return frozenset(
            path.name.removesuffix(_SUFFIX) for path in self._directory.glob("*" + _SUFFIX)
        )

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each log, by UID."""
        found: dict[str, int] = {}
        for path in self._directory.glob("*" + _SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                found[path.name.removesuffix(_SUFFIX)] = path.stat().st_size
        return found

    def _append(self, uid: str, entries: Iterable[NewEntry]) -> None:
        """Write entries with one call to the file, as far as the log has room for them."""
        size = self._size(uid)
        lines: list[bytes] = []
        total, is_full = size.bytes, size.is_full
        for entry in entries:
            exceeds = total + len(entry.data) > self._max_bytes
            if not is_full and (exceeds or size.lines + len(lines) >= self._max_lines):
                is_full = True
                lines.append(self._last_line(entry))
                total += len(lines[-1])
            if not is_full or (entry.matters and total < self._max_bytes + RESERVE_BYTES):
                lines.append(entry.data)
                total += len(entry.data)
        if lines:
            if self._ensure_room is not None:
                self._ensure_room("write the log of a build", total - size.bytes)
            _write(self._path(uid), size.bytes, b"".join(lines))
            self._count(size, lines)
        size.is_full = is_full

    @staticmethod
    def _count(size: _Size, lines: Iterable[bytes]) -> None:
        for line in lines:
            if size.lines % _MARKED_LINES == 0:
                size.marks.append(size.bytes)
            size.bytes += len(line)
            size.lines += 1

    def _last_line(self, entry: NewEntry) -> bytes:
        """Return the line that stands for an entry, and all later ones, of a full log."""
        message = (
            f"The log is full ({self._max_lines} lines or {self._max_bytes} bytes): "
            "further output is not stored."
        )
        return NewEntry.of(entry.timestamp, "warn", message, entry.step).data

    def _lines(self, uid: str, offset: int, limit: int) -> list[bytes]:
        """Return lines of a log. Nothing is read where there are none, as polling clients ask."""
        with self._lock:
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
        check_uid(uid)
        return self._directory / f"{uid}{_SUFFIX}"


def check_uid(uid: str) -> None:
    """Raise `ValueError` for a text that is not the UID of a build."""
    if not _UID.match(uid):
        raise ValueError(f"{uid!r} is not the UID of a build")


def matters(level: str) -> bool:
    """Whether entries of a level are warnings or errors."""
    return LEVELS.index(level) >= LEVELS.index("warn")


def _of_level(lines: Iterable[bytes], level: str) -> Iterable[bytes]:
    """Return the lines of this level and above."""
    if level == LEVELS[0]:
        return lines
    # Messages have their quotation marks escaped: only the field looks like this.
    fields_of = [f'"level":"{name}"'.encode() for name in LEVELS[LEVELS.index(level) :]]
    return (line for line in lines if any(field in line for field in fields_of))


def _write(path: Path, position: int, data: bytes) -> None:
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
