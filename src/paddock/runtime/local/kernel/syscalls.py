"""Thin wrappers for system calls that Python lacks.

They raise `OSError` with the call's name. All call numbers but one are the same on x86_64 and
aarch64. The calls that only the launcher needs are in `launcher.c`.
"""

import ctypes
import errno
import os
import platform
import signal
import stat
import struct

_libc = ctypes.CDLL(None, use_errno=True)

SYS_KCMP = 312 if platform.machine() == "x86_64" else 272
SYS_OPEN_TREE = 428
SYS_MOVE_MOUNT = 429
SYS_OPENAT2 = 437
SYS_PROCESS_MADVISE = 440
SYS_MOUNT_SETATTR = 442

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 32, 4096, 16384, 1 << 18, 1 << 19
MNT_DETACH = 2

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_NAME = 15
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 1 << 2
MADV_COLD, MADV_PAGEOUT = 20, 21
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 2, 16
_SLEEPER_STACK = 64 << 10


def _fail(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _call(what: str, number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise _fail(what)
    return result


def same_descriptors(one: int, other: int) -> bool:
    """Whether two threads share their table of descriptors; `True` if the kernel does not tell."""
    if one == other:
        return True
    kind = 2  # KCMP_FILES
    try:
        return _call("kcmp", SYS_KCMP, one, other, kind, 0, 0) == 0
    except ProcessLookupError:
        return False
    except OSError as problem:
        return problem.errno in (errno.ENOSYS, errno.EPERM)


def sleeper(flags: int, *, seconds: int) -> int:
    """Start a process that only sleeps in new namespaces; the caller kills and reaps the pid.

    Safe with threads: the child calls only the C library's `sleep` and takes no lock that another
    thread may hold. It exits after `seconds` if the caller dies.
    """
    stack = ctypes.create_string_buffer(_SLEEPER_STACK)
    top = (ctypes.addressof(stack) + _SLEEPER_STACK) & ~15
    pid = int(
        _libc.clone(
            ctypes.cast(_libc.sleep, ctypes.c_void_p),
            ctypes.c_void_p(top),
            ctypes.c_int(flags | signal.SIGCHLD),
            ctypes.c_void_p(seconds),
        )
    )
    if pid < 0:
        raise _fail("clone")
    return pid


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces."""
    if _libc.unshare(flags):
        raise _fail("unshare")


def setns(fd: int, flags: int) -> None:
    """Enter a namespace (or, given a pidfd, several)."""
    if _libc.setns(fd, flags):
        raise _fail("setns")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    fstype = kind.encode() if kind else None
    if _libc.mount(
        source.encode(), os.fsencode(target), fstype, ctypes.c_ulong(flags), data.encode()
    ):
        raise _fail(f"mount {kind or 'bind'} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    if _libc.umount2(os.fsencode(target), flags):
        raise _fail(f"umount {target}")


def open_tree(path: str, *, clone: bool = True, recursive: bool = False) -> int:
    """Return a descriptor of a mount, by default of a detached copy."""
    flags = OPEN_TREE_CLOEXEC | (OPEN_TREE_CLONE if clone else 0)
    flags |= AT_RECURSIVE if recursive else 0
    return _call(f"open_tree {path}", SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def move_mount(mount_fd: int, target: str) -> None:
    """Attach a detached mount; an empty target is the working directory, even if not searchable."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | (0 if target else MOVE_MOUNT_T_EMPTY_PATH)
    _call(
        f"move_mount to {target or 'here'}", SYS_MOVE_MOUNT, mount_fd, b"", AT_FDCWD,
        os.fsencode(target), flags,
    )  # fmt: skip


def mount_setattr(
    mount_fd: int, *, attributes: int, userns_fd: int | None = None, recursive: bool = False
) -> None:
    """Set attributes of a mount; with a user namespace also MOUNT_ATTR_IDMAP."""
    if userns_fd is not None:
        attributes |= MOUNT_ATTR_IDMAP
    packed = struct.pack("=QQQQ", attributes, 0, 0, userns_fd or 0)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    _call(
        "mount_setattr", SYS_MOUNT_SETATTR, mount_fd, b"", flags, buffer,
        ctypes.c_size_t(len(packed)),
    )  # fmt: skip


def prctl(option: int, value: int | bytes) -> None:
    """prctl(2) with one argument."""
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, 0, 0, 0):
        raise _fail(f"prctl {option}")


def open_in_root(root_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path with `root_fd` as `/`; links cannot lead out of it."""
    resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
    packed = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return _call(
        f"openat2 {path}", SYS_OPENAT2, root_fd, os.fsencode(path), buffer,
        ctypes.c_size_t(len(packed)),
    )  # fmt: skip


def is_program_in_root(root_fd: int, path: str) -> bool:
    """Whether a path names a file that somebody may execute, with `root_fd` as `/`."""
    try:
        fd = open_in_root(root_fd, path, os.O_PATH)
    except OSError:
        return False
    try:
        mode = os.fstat(fd).st_mode
    finally:
        os.close(fd)
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def sethostname(name: str) -> None:
    """Set the host name in the caller's UTS namespace."""
    encoded = name.encode()
    if _libc.sethostname(encoded, len(encoded)):
        raise _fail("sethostname")


def set_file_ids(uid: int, gid: int) -> None:
    """Set the file system ids of the calling thread; the order keeps the privilege to go back."""
    if uid:
        _libc.setfsgid(gid)
        _libc.setfsuid(uid)
    else:
        _libc.setfsuid(uid)
        _libc.setfsgid(gid)


def process_madvise(pidfd: int, ranges: list[tuple[int, int]], advice: int) -> int:
    """Call process_madvise(2) on ranges of another process; return the bytes advised."""
    packed = b"".join(struct.pack("=QQ", start, length) for start, length in ranges)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return _call(
        "process_madvise", SYS_PROCESS_MADVISE, pidfd, buffer, ctypes.c_size_t(len(ranges)),
        advice, 0,
    )  # fmt: skip
