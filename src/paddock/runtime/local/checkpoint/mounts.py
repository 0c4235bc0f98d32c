"""External mounts of a sandbox, and the mount namespace in which CRIU runs.

A mount of a sandbox is external if its file system is also mounted on the host. CRIU runs in a
private mount namespace with a tmpfs on /run: there it caches what it detected about the kernel
(detection takes tens of milliseconds), and there the root of a restore is attached, invisible to
the host.
"""

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from paddock.runtime.local.checkpoint.threads import CallerThread, run_in_thread
from paddock.runtime.local.kernel import syscalls

T = TypeVar("T")

RUN = "/run"
TEMPORARY = "/tmp"  # noqa: S108 - a private one is mounted there
_CLONE_FS = 0x00000200
_KEPT = ("/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
"""Mounts that CRIU needs. Others are unmounted, so that the host can still unmount them."""


class MountEntry(Struct, frozen=True, kw_only=True):
    """One line of `mountinfo`."""

    device: str
    root: str
    point: str
    kind: str


class ExternalMount(Struct, frozen=True, kw_only=True):
    """A mount from outside the sandbox."""

    key: str
    point: str
    source: str | None
    """The host's device node, or `None` for a mount that must be passed again on restore."""


def parse_mountinfo(text: str) -> tuple[MountEntry, ...]:
    """Parse /proc/<pid>/mountinfo."""
    found: list[MountEntry] = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        parts = before.split(" ")
        if not separator or len(parts) < 6:
            raise ValueError(f"not a line of mountinfo: {line!r}")
        found.append(
            MountEntry(
                device=parts[2],
                root=_unescape(parts[3]),
                point=_unescape(parts[4]),
                kind=after.split(" ")[0],
            )
        )
    return tuple(found)


def find_externals(
    inside: tuple[MountEntry, ...], host: tuple[MountEntry, ...]
) -> tuple[ExternalMount, ...]:
    """Return the mounts of a sandbox whose file system is mounted on the host."""
    host_devices = {mount.device for mount in host}
    externals: list[ExternalMount] = []
    for number, mount in enumerate(inside):
        if mount.point == "/" or mount.device not in host_devices:
            continue
        source = f"/dev{mount.root}" if mount.kind == "devtmpfs" else None
        externals.append(ExternalMount(key=f"mount-{number}", point=mount.point, source=source))
    return tuple(externals)


class CriuMountNamespace:
    """The private mount namespace of CRIU, created once and copied for each run."""

    def __init__(self, *programs: str) -> None:
        """Keep the mounts of `programs`, which run in this namespace."""
        self._programs = programs
        self._namespace = -1
        self._lock = threading.Lock()

    def run(self, work: Callable[[CallerThread], T], *, name: str) -> T:
        """Run `work` in a new thread that has its own copy of the namespace.

        `setns` affects only the calling thread, child processes start in the namespace of the
        thread, and the thread cannot return. Steps that need the host's mounts are run with
        `CallerThread.run`.
        """
        with self._lock:
            if self._namespace < 0:
                self._namespace = run_in_thread(lambda _: self._make(), name="criu-workplace")
        namespace = self._namespace

        def inside(caller: CallerThread) -> T:
            syscalls.unshare(_CLONE_FS)
            syscalls.setns(namespace, syscalls.CLONE_NEWNS)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            return work(caller)

        return run_in_thread(inside, name=name)

    def _make(self) -> int:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        with open("/proc/thread-self/mountinfo") as mountinfo:
            entries = parse_mountinfo(mountinfo.read())
        for mount in reversed(entries):
            needed = (*_KEPT, *self._programs)
            if not any(
                _is_below(path, mount.point) or _is_below(mount.point, path) for path in needed
            ):
                _detach(mount.point)
        syscalls.mount("tmpfs", RUN, "tmpfs", syscalls.MS_NODEV | syscalls.MS_NOSUID, "mode=711")
        if not any(_is_below(program, TEMPORARY) for program in self._programs):
            # CRIU builds mount trees in /tmp; a killed CRIU must leave nothing on the host.
            syscalls.mount("tmpfs", TEMPORARY, "tmpfs", syscalls.MS_NOSUID, "mode=1777")
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        with self._lock:
            if self._namespace >= 0:
                os.close(self._namespace)
                self._namespace = -1


def _detach(point: str) -> None:
    """Unmount; a mount whose mount point the host removed in between is gone already."""
    try:
        syscalls.umount(point, syscalls.MNT_DETACH)
    except OSError as problem:
        if problem.errno not in (errno.ENOENT, errno.EINVAL):
            raise


def _is_below(path: str, above: str) -> bool:
    return above == "/" or path == above or path.startswith(f"{above}/")


def _unescape(text: str) -> str:
    """Decode the kernel's octal escapes."""
    out, at = bytearray(), 0
    data = os.fsencode(text)
    while at < len(data):
        if data[at] == 0x5C and data[at + 1 : at + 4].isdigit():
            out.append(int(data[at + 1 : at + 4], 8) & 0xFF)
            at += 4
        else:
            out.append(data[at])
            at += 1
    return os.fsdecode(bytes(out))
