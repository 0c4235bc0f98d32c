"""Reads the files of the audit log, oldest event first."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paddock.api.audit.event import AuditEvent
from paddock.api.audit.files import NAME

POLL_SECONDS = 0.2
_decoder = msgspec.json.Decoder(AuditEvent)


def decode(line: bytes) -> AuditEvent | None:
    """Return the event of a line, or None if a crash cut the line off."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def paths(directory: Path) -> list[Path]:
    """Return all files, those of one process together, oldest first."""
    found = [(match, path) for path in directory.glob("audit-*.log*") if (match := _match(path))]
    return [path for _, path in sorted(found, key=lambda item: item[0])]


def _match(path: Path) -> tuple[int, int] | None:
    match = NAME.fullmatch(path.name)
    return (int(match[1]), -int(match[2] or 0)) if match else None


def read(directory: Path) -> list[tuple[bytes, AuditEvent]]:
    """Return every line and its event, in the order in which they were written."""
    found: list[tuple[bytes, AuditEvent]] = []
    for path in paths(directory):
        with path.open("rb") as file:
            found += [(line, event) for line in file if (event := decode(line)) is not None]
    found.sort(key=lambda item: item[1].stage_timestamp)
    return found


def follow(directory: Path) -> Iterator[tuple[bytes, AuditEvent]]:
    """Yield lines as they are written, also to files that are created meanwhile."""
    places = {path: path.stat().st_size for path in _current(directory)}
    inodes = {path: path.stat().st_ino for path in places}
    while True:
        for path in _current(directory):
            if inodes.get(path) != path.stat().st_ino:
                # A new file, or the old one was rotated: read the rest of it first.
                yield from _rest(path.with_name(f"{path.name}.1"), inodes.get(path), places)
                inodes[path], places[path] = path.stat().st_ino, 0
            for line in _lines(path, places.get(path, 0)):
                places[path] = places.get(path, 0) + len(line)
                if (event := decode(line)) is not None:
                    yield line, event
        time.sleep(POLL_SECONDS)


def _current(directory: Path) -> list[Path]:
    return [path for path in paths(directory) if path.suffix == ".log"]


def _rest(
    older: Path, inode: int | None, places: dict[Path, int]
) -> Iterator[tuple[bytes, AuditEvent]]:
    """Yield what was appended to a file between the last look and its rotation."""
    if inode is None or not older.exists() or older.stat().st_ino != inode:
        return
    for line in _lines(older, places.get(older.with_suffix(""), 0)):
        if (event := decode(line)) is not None:
            yield line, event


def _lines(path: Path, start: int) -> Iterator[bytes]:
    """Yield whole lines from a position on."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line
