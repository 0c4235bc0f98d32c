"""Unpack a layer: convert an untrusted tar to a directory for overlayfs.

Every path is walked component by component below the target without following links, so nothing
outside can be changed, whatever the names, links and their order are. Whiteouts become overlayfs
whiteouts; device nodes are rejected (below /dev they are skipped: a sandbox gets its own); extended
attributes that overlayfs interprets are dropped.
"""

import contextlib
import errno
import gzip
import os
import shutil
import stat
import tarfile
from collections.abc import Generator
from pathlib import Path
from typing import IO, cast

from paddock.kit.errors import InvalidError
from paddock.runtime.local.images.limits import ImportBudget
from paddock.runtime.local.storage.backend import storage_error
from paddock.wire.bounded_tar import DAMAGE, BoundedTarInfo

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
_AUFS_PREFIX = ".wh..wh."
XATTR_PAX = "SCHILY.xattr."
KEPT_XATTRS = ("user.", "security.capability")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OF_NAMES = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.ENOENT, errno.ELOOP})
"""Errors of the file system for names, links and values that it cannot store."""
_CHUNK = 1 << 20
_BLOCK = 256 << 10
"""What is decompressed, hashed and parsed at once."""


def unpack_layer(stream: IO[bytes], target: Path, budget: ImportBudget) -> None:
    """Unpack an uncompressed tar stream into an empty directory."""
    unpacker = _Unpacker(target, budget)
    try:
        with tarfile.open(
            fileobj=stream,
            mode="r|",
            format=tarfile.PAX_FORMAT,
            tarinfo=BoundedTarInfo,
            bufsize=_BLOCK,
        ) as archive:
            for member in archive:
                if member.size < 0:
                    raise InvalidError(f"the layer contains {member.name!r} of a negative size")
                budget.count_entry(member.name, member.size if member.isreg() else 0)
                unpacker.add(member, archive)
                archive.members = []  # type: ignore[attr-defined] # or all are kept in memory
        unpacker.finish()
        # The checksum covers every byte, including those after the end-of-archive marker.
        while stream.read(_CHUNK):
            pass
    except (*DAMAGE, gzip.BadGzipFile) as error:
        raise InvalidError(f"the layer is not a readable tar: {error}") from error
    except OSError as error:
        if error.errno in _OF_NAMES:
            raise InvalidError(f"the layer cannot be unpacked: {error.strerror}") from error
        raise storage_error(error, "the layer could not be unpacked") from error
    finally:
        unpacker.close()


def split_path(name: str) -> tuple[str, ...]:
    """Split a member's name into components below the target; () is the root."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or "\0" in name:
        raise InvalidError(f"the layer contains the path {name!r}, which leads outside")
    return parts


class _Unpacker:
    def __init__(self, target: Path, budget: ImportBudget) -> None:
        self._root = os.open(target, _DIRECTORY_FLAGS)
        self._budget = budget
        self._times: dict[tuple[str, ...], float] = {}

    def close(self) -> None:
        os.close(self._root)

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        parts = split_path(member.name)
        if not parts:
            if member.isdir():
                self._set_metadata(self._root, member)
            return
        with self._parent(parts, member.name) as parent:
            name = parts[-1]
            if name.startswith(WHITEOUT):
                self._apply_whiteout(parent, name)
            else:
                self._make(parent, name, parts, member, archive)

    def finish(self) -> None:
        """Set the times of directories, which unpacking has changed."""
        for parts, when in self._times.items():
            with contextlib.suppress(OSError, InvalidError), self._parent(parts, "/") as parent:
                os.utime(parts[-1], (when, when), dir_fd=parent, follow_symlinks=False)

    def _make(
        self,
        parent: int,
        name: str,
        parts: tuple[str, ...],
        member: tarfile.TarInfo,
        archive: tarfile.TarFile,
    ) -> None:
        if member.isdir():
            self._directory(parent, name, member)
            self._times[parts] = member.mtime
            return
        if (member.ischr() or member.isblk()) and parts[0] == "dev":
            return
        _remove(parent, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            self._hard_link(parent, name, member)
            return
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            os.chmod(name, member.mode & 0o7777, dir_fd=parent)
        elif member.isreg():
            self._file(parent, name, member, archive)
        else:
            raise InvalidError(
                f"the layer contains {member.name!r}, a device node or something unknown",
                hint="device nodes do not belong in images: sandboxes get their own /dev",
            )
        when = member.mtime
        os.utime(name, (when, when), dir_fd=parent, follow_symlinks=False)

    @contextlib.contextmanager
    def _parent(self, parts: tuple[str, ...], name: str) -> Generator[int, None, None]:
        """Open the parent directory of a member; create missing ones, never follow links."""
        current = os.dup(self._root)
        try:
            for part in parts[:-1]:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=current)
                try:
                    below = os.open(part, _DIRECTORY_FLAGS, dir_fd=current)
                except OSError as error:
                    raise InvalidError(
                        f"the layer contains {name!r}, whose directory {part!r} is a link or a file"
                    ) from error
                os.close(current)
                current = below
            yield current
        finally:
            os.close(current)

    def _directory(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                _remove(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
        try:
            self._set_metadata(fd, member)
        finally:
            os.close(fd)

    def _file(
        self, parent: int, name: str, member: tarfile.TarInfo, archive: tarfile.TarFile
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb", buffering=0) as file:
            if member.sparse is not None:
                self._sparse(member, archive, file)
            elif (source := archive.extractfile(member)) is not None:
                shutil.copyfileobj(source, file, _CHUNK)
            self._set_metadata(file.fileno(), member)

    def _sparse(self, member: tarfile.TarInfo, archive: tarfile.TarFile, file: IO[bytes]) -> None:
        """Write a sparse file with its holes, which take no space."""
        listed = cast("list[tuple[int, int]]", member.sparse)
        parts = [(offset, size) for offset, size in listed if size]  # some formats pad the list
        end = 0
        for offset, size in parts:
            if size < 0 or not end <= offset <= offset + size <= member.size:
                raise InvalidError(f"the layer contains {member.name!r}, a malformed sparse file")
            end = offset + size
        self._budget.count_holes(member.size - sum(size for _, size in parts))
        source = cast("IO[bytes]", archive.fileobj)
        source.seek(member.offset_data)
        for offset, size in parts:
            file.seek(offset)
            _copy(source, file, size)
        file.truncate(member.size)

    def _hard_link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        source = split_path(member.linkname)
        if not source:
            raise InvalidError(f"the layer contains {member.name!r}, a link to its root")
        with self._parent(source, member.linkname) as source_parent:
            try:
                os.link(
                    source[-1],
                    name,
                    src_dir_fd=source_parent,
                    dst_dir_fd=parent,
                    follow_symlinks=False,
                )
            except OSError as error:
                raise InvalidError(
                    f"the layer contains {member.name!r}, a link to {member.linkname!r}, which "
                    f"cannot be linked: {error.strerror}"
                ) from error

    def _apply_whiteout(self, parent: int, name: str) -> None:
        if name == OPAQUE:
            _set_overlay_opaque(parent)
        elif not name.startswith(_AUFS_PREFIX):
            hidden = name.removeprefix(WHITEOUT)
            if hidden in ("", ".", ".."):
                raise InvalidError(f"the layer contains the whiteout {name!r}, which hides nothing")
            _remove(parent, hidden)
            os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)

    def _set_metadata(self, fd: int, member: tarfile.TarInfo) -> None:
        # The owner first: changing it clears set-uid bits and capabilities.
        os.fchown(fd, member.uid, member.gid)
        os.fchmod(fd, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            attribute = key.removeprefix(XATTR_PAX)
            if attribute != key and attribute.startswith(KEPT_XATTRS):
                os.setxattr(fd, attribute, value.encode("utf-8", "surrogateescape"))


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size > 0:
        data = source.read(min(size, _CHUNK))
        if not data:
            raise tarfile.ReadError("unexpected end of data")
        target.write(data)
        size -= len(data)


def _set_overlay_opaque(fd: int) -> None:
    attribute = "trusted.overlay.opaque" if os.geteuid() == 0 else "user.overlay.opaque"
    os.setxattr(fd, attribute, b"y")


def _remove(parent: int, name: str) -> None:
    """Remove an existing entry: a later member of a tar replaces an earlier one."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)
