"""Pack a layer: convert a directory for overlayfs to a compressed tar. Undoes `images.unpack`.

The same directory always becomes the same bytes: entries are sorted, and nothing is written that
belongs to this machine. Memory does not grow with the size of a layer.
"""

import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from msgspec import Struct

from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.runtime.local.images.merged_tree import is_opaque
from paddock.runtime.local.images.unpack import KEPT_XATTRS, OPAQUE, WHITEOUT, XATTR_PAX
from paddock.runtime.local.storage.backend import storage_error

_LEVEL = 6
_OVERLAY_XATTRS = ("trusted.overlay.", "user.overlay.")
_REFERENCES = ("redirect", "metacopy")
"""Attributes of overlayfs by which a file has its content or name from another layer."""


class PackedLayer(Struct, frozen=True, kw_only=True):
    """A layer as registries have it."""

    digest: str
    """Of the compressed bytes."""
    diff_id: str
    """Of the tar."""
    size: int


class _Hashing:
    """Passes bytes on, counts and hashes them."""

    def __init__(self, target: IO[bytes], on_bytes: Callable[[int], None]) -> None:
        self._target = target
        self._hash = hashlib.sha256()
        self._on_bytes = on_bytes
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        self._target.write(data)
        self._on_bytes(self.size)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def pack_layer(
    source: Path,
    target: IO[bytes],
    *,
    on_read: Callable[[int], None] = lambda _: None,
    on_written: Callable[[int], None] = lambda _: None,
) -> PackedLayer:
    """Write the layer to a file. The callbacks get the bytes of the tar, and those of the file."""
    packed = _Hashing(target, on_written)
    try:
        with gzip.GzipFile(
            fileobj=cast("IO[bytes]", packed), mode="wb", compresslevel=_LEVEL, filename="", mtime=0
        ) as compressed:
            plain = _Hashing(cast("IO[bytes]", compressed), on_read)
            with tarfile.open(
                fileobj=cast("IO[bytes]", plain),
                mode="w|",
                format=tarfile.PAX_FORMAT,
                encoding="utf-8",
                errors="surrogateescape",
            ) as archive:
                _add_tree(archive, source)
    except OSError as error:
        raise storage_error(error, f"the layer {source} could not be packed") from error
    return PackedLayer(digest=packed.digest, diff_id=plain.digest, size=packed.size)


def _add_tree(archive: tarfile.TarFile, root: Path) -> None:
    linked: dict[tuple[int, int], str] = {}
    pending = [""]
    while pending:
        name = pending.pop()
        path = root / name
        info = path.lstat()
        _add(archive, path, name, info, linked)
        archive.members = []  # type: ignore[attr-defined] # or all are kept in memory
        if stat.S_ISDIR(info.st_mode):
            if is_opaque(path):
                _add_empty(archive, f"{name}/{OPAQUE}" if name else OPAQUE)
            children = sorted(os.listdir(path), reverse=True)
            pending += [f"{name}/{child}" if name else child for child in children]


def _add(
    archive: tarfile.TarFile,
    path: Path,
    name: str,
    info: os.stat_result,
    linked: dict[tuple[int, int], str],
) -> None:
    """Add one entry; `linked` has the first names of files with several."""
    parent, _, last = name.rpartition("/")
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
        _add_empty(archive, f"{parent}/{WHITEOUT}{last}" if parent else f"{WHITEOUT}{last}")
        return
    if last.startswith(WHITEOUT):
        raise UnsupportedError(f"{name!r} cannot be in an image: its name is that of a whiteout")
    member = _member(name or ".", info)
    if stat.S_ISREG(info.st_mode):
        first = linked.get((info.st_dev, info.st_ino))
        if first is None:
            if info.st_nlink > 1:
                linked[info.st_dev, info.st_ino] = name
            _add_file(archive, path, member)
            return
        member.type, member.linkname = tarfile.LNKTYPE, first
    elif not _describe(member, path, info):
        return
    archive.addfile(member)


def _describe(member: tarfile.TarInfo, path: Path, info: os.stat_result) -> bool:
    """Complete what is no regular file. Whether it belongs in an image."""
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        member.pax_headers = _attributes(path)
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISFIFO(info.st_mode):
        member.type = tarfile.FIFOTYPE
    elif stat.S_ISSOCK(info.st_mode) or member.name.startswith("dev/"):
        return False  # a sandbox gets its own /dev
    else:
        raise InvalidError(
            f"the layer contains {member.name!r}, a device node",
            hint="device nodes do not belong in images: sandboxes get their own /dev",
        )
    return True


def _member(name: str, info: os.stat_result) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(info.st_mode)
    member.uid, member.gid = info.st_uid, info.st_gid
    member.mtime = int(info.st_mtime)
    return member


def _add_file(archive: tarfile.TarFile, path: Path, member: tarfile.TarInfo) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        member.size = os.fstat(descriptor).st_size
        member.pax_headers = _attributes(path)
        archive.addfile(member, file)


def _attributes(path: Path) -> dict[str, str]:
    """Return the extended attributes that images have."""
    found: dict[str, str] = {}
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        if name.startswith(_OVERLAY_XATTRS):
            if name.rpartition(".")[2] in _REFERENCES:
                raise UnsupportedError(f"{path} has its content from another layer")
        elif name.startswith(KEPT_XATTRS):
            value = os.getxattr(path, name, follow_symlinks=False)
            found[f"{XATTR_PAX}{name}"] = value.decode("utf-8", "surrogateescape")
    return found


def _add_empty(archive: tarfile.TarFile, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0
    archive.addfile(member)
