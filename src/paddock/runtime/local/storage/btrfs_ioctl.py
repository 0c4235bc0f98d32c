"""Btrfs subvolumes and quotas by ioctl, without starting programs.

Numbers and layouts are those of `<linux/btrfs.h>`. Errors are raised as `OSError`.
"""

import ctypes
import errno
import fcntl
import os
import struct
import uuid
from pathlib import Path

MAGIC = 0x9123683E

_TYPE = 0x94
_WRITE, _READ = 1, 2
_VOLUME_ARGS = struct.Struct("q4088s")
_VOLUME_ARGS_V2 = struct.Struct("qQQ32s4040s")
_LOOKUP_ARGS = struct.Struct("QQ4080s")
_QUOTA_ARGS = struct.Struct("QQ")
_LIMIT_ARGS = struct.Struct("QQQQQQ")
_QGROUP_CREATE_ARGS = struct.Struct("QQ")
_FIRST_FREE_OBJECT = 256
_LIMIT_REFERENCED = 1
_NO_LIMIT = 0xFFFFFFFFFFFFFFFF

_QUOTA_ENABLE = 1
_QUOTA_ENABLE_SIMPLE = 4


def _number(direction: int, number: int, size: int) -> int:
    return (direction << 30) | (size << 16) | (_TYPE << 8) | number


_RESIZE = _number(_WRITE, 3, _VOLUME_ARGS.size)
_SUBVOL_CREATE = _number(_WRITE, 14, _VOLUME_ARGS.size)
_SNAP_DESTROY = _number(_WRITE, 15, _VOLUME_ARGS.size)
_INO_LOOKUP = _number(_READ | _WRITE, 18, _LOOKUP_ARGS.size)
_SNAP_CREATE_V2 = _number(_WRITE, 23, _VOLUME_ARGS_V2.size)
_FS_INFO = _number(_READ, 31, 1024)
_QUOTA_CTL = _number(_READ | _WRITE, 40, _QUOTA_ARGS.size)
_QGROUP_CREATE = _number(_WRITE, 42, _QGROUP_CREATE_ARGS.size)
_QGROUP_LIMIT = _number(_READ, 43, _LIMIT_ARGS.size)
_libc = ctypes.CDLL(None, use_errno=True)


def is_btrfs(path: Path) -> bool:
    """Whether path is on btrfs (os.statvfs does not return the file system type)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    kind: int = struct.unpack_from("l", buffer.raw)[0]
    return kind & 0xFFFFFFFF == MAGIC


def is_subvolume(path: Path) -> bool:
    """Whether path is the root of a subvolume."""
    try:
        return path.stat().st_ino == _FIRST_FREE_OBJECT and path.is_dir()
    except FileNotFoundError:
        return False


def create_subvolume(path: Path) -> None:
    """Create an empty subvolume."""
    _on_parent(path, _SUBVOL_CREATE)


def destroy_subvolume(path: Path) -> None:
    """Remove a subvolume at once; the kernel frees its blocks in the background."""
    _on_parent(path, _SNAP_DESTROY)


def snapshot(source: Path, target: Path) -> None:
    """Create a writable snapshot of the subvolume `source`."""
    with _opened(source) as source_fd, _opened(target.parent) as parent_fd:
        arguments = _VOLUME_ARGS_V2.pack(source_fd, 0, 0, b"", os.fsencode(target.name))
        _call(parent_fd, _SNAP_CREATE_V2, arguments)


def subvolume_id(path: Path) -> int:
    """Return the id of the subvolume that contains path; its qgroup has the same id."""
    with _opened(path) as fd:
        result = _call(fd, _INO_LOOKUP, _LOOKUP_ARGS.pack(0, _FIRST_FREE_OBJECT, b""))
    return _LOOKUP_ARGS.unpack(result)[0]


def file_system_id(path: Path) -> str:
    """Return the UUID of the file system, which is also its directory name in sysfs."""
    with _opened(path) as fd:
        result = _call(fd, _FS_INFO, bytes(1024))
    return str(uuid.UUID(bytes=result[16:32]))


def enable_quotas(path: Path) -> bool:
    """Enable quotas, simple ones if the kernel supports them; return whether they are simple.

    Simple quotas charge each extent to the subvolume that wrote it. They cost nothing on snapshot
    and delete, where full qgroups must walk every shared extent.
    """
    with _opened(path) as fd:
        try:
            _call(fd, _QUOTA_CTL, _QUOTA_ARGS.pack(_QUOTA_ENABLE_SIMPLE, 0))
        except OSError as error:
            if error.errno == errno.EEXIST:
                return True
            if error.errno not in (errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP):
                raise
        else:
            return True
        _call(fd, _QUOTA_CTL, _QUOTA_ARGS.pack(_QUOTA_ENABLE, 0))
    return False


def limit_subvolume(root: Path, path: Path, limit_bytes: int) -> None:
    """Limit data and metadata of a subvolume; 0 removes the limit.

    The call is made in the root directory of all subvolumes: it needs space there, which the
    subvolume itself may have used up.
    """
    bound, group = limit_bytes if limit_bytes > 0 else _NO_LIMIT, subvolume_id(path)
    with _opened(root) as fd:
        _call(fd, _QGROUP_LIMIT, _LIMIT_ARGS.pack(group, _LIMIT_REFERENCED, bound, 0, 0, 0))


def drop_qgroup(root: Path, identifier: int) -> None:
    """Remove the quota group of a deleted subvolume."""
    with _opened(root) as fd:
        _call(fd, _QGROUP_CREATE, _QGROUP_CREATE_ARGS.pack(0, identifier))


def grow_to_device(root: Path) -> None:
    """Grow the file system to the size of its device."""
    with _opened(root) as fd:
        _call(fd, _RESIZE, _VOLUME_ARGS.pack(0, b"max"))


def sync_tree(path: Path) -> None:
    """`syncfs(2)`."""
    with _opened(path) as fd:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))


def _call(fd: int, request: int, arguments: bytes) -> bytes:
    # A mutable buffer: Python copies immutable ones to a fixed buffer that is too small.
    buffer = bytearray(arguments)
    fcntl.ioctl(fd, request, buffer)
    return bytes(buffer)


class _opened:  # noqa: N801 - reads as a verb where it is used
    """Context manager that opens a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _on_parent(path: Path, request: int) -> None:
    with _opened(path.parent) as fd:
        _call(fd, request, _VOLUME_ARGS.pack(0, os.fsencode(path.name)))
