"""Reading an archive of files: tar or tar.gz, recognized by its first bytes, and not trusted.

Sizes, entries and headers are bounded. Names that lead out of the archive, hard links to files
outside of it, and devices are refused by name.
"""

import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, cast

from msgspec import Struct

from paddock.wire.bounded_tar import DAMAGE, BoundedTarInfo

_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20


class ArchiveError(Exception):
    """The archive is damaged, hostile or too large; the message names the member."""


class ArchiveLimits(Struct, frozen=True):
    """What one archive may have at most."""

    max_bytes: int = 16 << 30
    """Of all files, unpacked."""
    max_entries: int = 500_000


class ArchiveMember(Struct, frozen=True):
    """One file, directory or link of an archive."""

    path: tuple[str, ...]
    """Components of its name; empty for the root."""
    kind: int
    """A file type of `stat`, such as `S_IFREG`."""
    mode: int
    mtime: float
    link: str = ""
    """Target of a symbolic link."""
    same_as: tuple[str, ...] = ()
    """The member that a hard link repeats; then there is no content."""
    content: IO[bytes] | None = None


def members(file: IO[bytes], limits: ArchiveLimits) -> Iterator[ArchiveMember]:
    """Yield the members in order. The content of each must be read before the next one."""
    stream = _decompressed(file)
    entries = size = 0
    try:
        reader = cast("IO[bytes]", stream)
        with tarfile.open(fileobj=reader, mode="r|", tarinfo=BoundedTarInfo) as archive:
            for entry in archive:
                entries, size = entries + 1, size + entry.size
                if entries > limits.max_entries:
                    raise ArchiveError(f"the archive has more than {limits.max_entries:,} entries")
                if size > limits.max_bytes:
                    raise ArchiveError(
                        f"the archive has more than {limits.max_bytes:,} bytes unpacked "
                        f"(at {entry.name!r})"
                    )
                yield _member(entry, archive)
                archive.members = []  # type: ignore[attr-defined] # or all are kept in memory
    except DAMAGE as error:
        raise ArchiveError(f"the archive cannot be read: {error}") from error


def _member(entry: tarfile.TarInfo, archive: tarfile.TarFile) -> ArchiveMember:
    path = _components(entry.name, entry.name)
    common = {"path": path, "mode": entry.mode & 0o7777, "mtime": float(entry.mtime)}
    if entry.isdir():
        return ArchiveMember(kind=stat.S_IFDIR, **common)  # type: ignore[arg-type]
    if entry.issym():
        return ArchiveMember(kind=stat.S_IFLNK, link=entry.linkname, **common)  # type: ignore[arg-type]
    if entry.islnk():
        same = _components(entry.linkname, entry.name)
        return ArchiveMember(kind=stat.S_IFREG, same_as=same, **common)  # type: ignore[arg-type]
    if entry.isreg():
        content = archive.extractfile(entry)
        return ArchiveMember(kind=stat.S_IFREG, content=content, **common)  # type: ignore[arg-type]
    raise ArchiveError(
        f"the archive contains {entry.name!r}, which is neither a file, a directory nor a link"
    )


def _components(name: str, shown: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or "\0" in name:
        raise ArchiveError(f"the archive contains {shown!r}, which leads out of the archive")
    return parts


def _decompressed(file: IO[bytes]) -> "IO[bytes] | _Inflated":
    start = file.tell()
    magic = file.read(len(_GZIP))
    file.seek(start, os.SEEK_SET)
    return _Inflated(file) if magic == _GZIP else file


class _Inflated:
    """A gzip file as a stream; several members follow each other, as gzip allows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(31)
        self._input = b""

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, fewer only at the end."""
        pieces: list[bytes] = []
        left = size
        while left > 0:
            self._input = self._input or self._file.read(_CHUNK)
            if not self._input:
                break
            piece = self._inflate.decompress(self._input, left)
            self._input = self._inflate.unconsumed_tail
            if self._inflate.eof:
                self._input = self._inflate.unused_data
                self._inflate = zlib.decompressobj(31)
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)
