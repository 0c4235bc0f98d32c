"""Project quotas of ext4 and XFS: limits on directory trees.

Each tree gets a project id, which files created below it inherit; the kernel accounts by project.
The id is the tree's inode number, which is unique on its file system.
"""

import ctypes
import errno
import fcntl
import os
import stat
import struct
import tempfile
from pathlib import Path

_QUOTACTL_FD = 443
_PROJECT = 2
_SUBCOMMAND_SHIFT = 8
_Q_GETINFO = 0x800005
_Q_SETQUOTA = 0x800008
_QIF_LIMITS = 5
_TRIAL_BYTES = 256 << 10
_BYTES_PER_INODE = 4096
"""Inodes are limited along with bytes: an empty file counts as one block."""

_FS_IOC_FSGETXATTR = 0x801C581F
_FS_IOC_FSSETXATTR = 0x401C5820
_INHERIT = 0x200
_XATTR = struct.Struct("IIIII8s")
_DQBLK = struct.Struct("QQQQQQQQI4x")
_libc = ctypes.CDLL(None, use_errno=True)

_MISSING = (
    "{root} is on a file system without project quotas; put the state directory on btrfs, or "
    "install btrfs-progs so that a btrfs image can be created, or mount it with prjquota"
)


class ProjectQuotas:
    """Limits on trees below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def unavailable_reason(self) -> str | None:
        """Return why limits cannot be set here, or `None`."""
        try:
            self._call(_Q_GETINFO, 0, ctypes.create_string_buffer(64))
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY):
                return _MISSING.format(root=self._root)
            return f"project quotas cannot be used on {self._root}: {error.strerror}"
        return self._enforcement_problem()

    def _enforcement_problem(self) -> str | None:
        """Return why limits are not enforced, by exceeding one; `None` if they are."""
        with tempfile.TemporaryDirectory(prefix=".quota-", dir=self._root) as name:
            try:
                self.limit(Path(name), _TRIAL_BYTES)
                with open(f"{name}/file", "wb", buffering=0) as file:
                    for _ in range(8):
                        file.write(bytes(_TRIAL_BYTES))
                        os.fsync(file.fileno())
            except OSError as error:
                if error.errno in (errno.EDQUOT, errno.ENOSPC):
                    return None
                return f"project quotas cannot be used on {self._root}: {error.strerror}"
        return (
            f"project quotas on {self._root} are accounted but not enforced; mount it with prjquota"
        )

    def limit(self, tree: Path, limit_bytes: int) -> None:
        """Limit bytes and inodes below a tree; 0 removes both limits."""
        project = tree.stat().st_ino & 0x7FFFFFFF
        _join_project(tree, project)
        for directory, names, files in os.walk(tree):
            for name in (*names, *files):
                # Copied files were created before the tree had a project to inherit.
                _join_project(Path(directory, name), project)
        blocks = limit_bytes // 1024
        inodes = limit_bytes // _BYTES_PER_INODE
        block = _DQBLK.pack(blocks, blocks, 0, inodes, inodes, 0, 0, 0, _QIF_LIMITS)
        self._call(_Q_SETQUOTA, project, ctypes.create_string_buffer(block, len(block)))

    def _call(self, command: int, identifier: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            done = _libc.syscall(
                ctypes.c_long(_QUOTACTL_FD),
                ctypes.c_uint(fd),
                ctypes.c_uint((command << _SUBCOMMAND_SHIFT) | _PROJECT),
                ctypes.c_uint(identifier),
                buffer,
            )
        finally:
            os.close(fd)
        if done != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(self._root))


def _join_project(path: Path, project: int) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOENT):
            return  # symlinks, sockets and removed files have no blocks
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            return
        buffer = bytearray(_XATTR.size)
        fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, buffer)
        flags, extent, extents, current, cow, padding = _XATTR.unpack(buffer)
        if current == project:
            return
        flags |= _INHERIT if stat.S_ISDIR(mode) else 0
        wanted = _XATTR.pack(flags, extent, extents, project, cow, padding)
        fcntl.ioctl(fd, _FS_IOC_FSSETXATTR, wanted)
    finally:
        os.close(fd)
