"""Archives that are uploaded for COPY and ADD, and the hashes that name them.

A hash covers what a step copies: names, modes, sizes and content, but neither owners nor times.
"""

import copy
import gzip
import hashlib
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from paddock.cli.template.context import ContextFile

_CHUNK = 1 << 20
_LEVEL = 1
"""Fast compression: uploads mostly stay in one network."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


class Archive(Protocol):
    """Files of one step."""

    def digest(self) -> str:
        """Return the hash that names the archive."""
        ...

    def write(self, file: BinaryIO) -> None:
        """Write the archive, compressed."""
        ...


class FileArchive:
    """Files of the build context."""

    def __init__(self, entries: Sequence[ContextFile], rename: Callable[[str], str]) -> None:
        """Create an archive of entries; those that `rename` leaves without a name are left out."""
        named = ((rename(entry.name), entry.path) for entry in entries)
        self._entries = sorted((name, path) for name, path in named if name)

    def digest(self) -> str:
        """Return the hash that names the archive."""
        total = hashlib.sha256()
        for name, path in self._entries:
            found = path.lstat()
            _add(total, name, found.st_mode)
            if stat.S_ISLNK(found.st_mode):
                total.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(found.st_mode):
                with path.open("rb") as file:
                    _add_content(total, file, found.st_size)
        return total.hexdigest()

    def write(self, file: BinaryIO) -> None:
        """Write the archive, compressed."""
        with _writer(file) as archive:
            for name, path in self._entries:
                archive.add(path, name, recursive=False, filter=_without_owner)


class TextArchive:
    """One file with a text that the Dockerfile contains."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._data = text.encode()

    def digest(self) -> str:
        """Return the hash that names the archive."""
        total = hashlib.sha256()
        _add(total, self._name, 0o644)
        _add_content(total, io.BytesIO(self._data), len(self._data))
        return total.hexdigest()

    def write(self, file: BinaryIO) -> None:
        """Write the archive, compressed."""
        member = tarfile.TarInfo(self._name)
        member.size = len(self._data)
        with _writer(file) as archive:
            archive.addfile(member, io.BytesIO(self._data))


class RepackedArchive:
    """Members of another archive, under other names."""

    def __init__(self, path: Path, rename: Callable[[tarfile.TarInfo], str]) -> None:
        """Create an archive; members that `rename` leaves without a name are left out."""
        self._path = path
        self._rename = rename

    def digest(self) -> str:
        """Return the hash that names the archive."""
        total = hashlib.sha256()
        for source, member in self._members():
            _add(total, member.name, member.mode)
            total.update(b"\0".join((member.type, os.fsencode(member.linkname))))
            if (content := source.extractfile(member) if member.isreg() else None) is not None:
                _add_content(total, content, member.size)
        return total.hexdigest()

    def write(self, file: BinaryIO) -> None:
        """Write the archive, compressed."""
        with _writer(file) as archive:
            for source, member in self._members():
                content = source.extractfile(member) if member.isreg() else None
                archive.addfile(member, content)

    def _members(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        with tarfile.open(self._path, "r:*") as source:
            for member in source:
                if name := self._rename(member):
                    renamed = _without_owner(copy.copy(member))
                    renamed.name = name
                    if member.islnk():
                        target = copy.copy(member)
                        target.name, target.type = member.linkname, tarfile.REGTYPE
                        renamed.linkname = self._rename(target)
                    yield source, renamed


def clean(name: str) -> str:
    """Return the name of a member without `./` and a slash at the start."""
    return posixpath.normpath(name.lstrip("/"))


@contextmanager
def _writer(file: BinaryIO) -> Generator[tarfile.TarFile]:
    # Without a name and a time, equal files make equal archives.
    with (
        gzip.GzipFile(
            filename="", fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0
        ) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        yield archive


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _add(total: _Hash, name: str, mode: int) -> None:
    total.update(os.fsencode(f"\0{name}\0{mode:o}\0"))


def _add_content(total: _Hash, file: IO[bytes], size: int) -> None:
    total.update(f"{size}\0".encode())
    while chunk := file.read(_CHUNK):
        total.update(chunk)
