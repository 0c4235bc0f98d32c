"""Mounts as CRIU must be told of them, and the mount namespace it works in.

Which mounts of a sandbox come from outside is read from the kernel: those whose file system is
also mounted on the host. CRIU itself runs in a private mount namespace with a tmpfs on /run: there
it keeps what it learnt about the kernel (else it learns it anew each time, which costs tens of
milliseconds), and there a root is attached for it that the host never sees.
"""

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from paddock.runtime.local.checkpoint.threads import Home, in_thread
from paddock.runtime.local.kernel import syscalls

T = TypeVar("T")

RUN = "/run"
TEMPORARY = "/tmp"  # noqa: S108 - a private one is mounted there
_CLONE_FS = 0x00000200
_KEPT = ("/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
"""What CRIU needs to see. Other mounts are let go, so that the host can still unmount them."""


class Mounted(Struct, frozen=True, kw_only=True):
    """One line of mountinfo."""

    device: str
    root: str
    point: str
    kind: str


class External(Struct, frozen=True, kw_only=True):
    """A mount that came from outside the sandbox."""

    key: str
    point: str
    source: str | None
    """The host's device node, or `None` for anything that must be given again on restore."""


def parse_mountinfo(text: str) -> tuple[Mounted, ...]:
    """Read /proc/<pid>/mountinfo."""
    found: list[Mounted] = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        parts = before.split(" ")
        if not separator or len(parts) < 6:
            raise ValueError(f"this is no line of mountinfo: {line!r}")
        found.append(
            Mounted(
                device=parts[2],
                root=_unescape(parts[3]),
                point=_unescape(parts[4]),
                kind=after.split(" ")[0],
            )
        )
    return tuple(found)


def find_externals(inside: tuple[Mounted, ...], host: tuple[Mounted, ...]) -> tuple[External, ...]:
    """Pick the mounts of a sandbox that lie on file systems of the host."""
    host_devices = {mount.device for mount in host}
    externals: list[External] = []
    for number, mount in enumerate(inside):
        if mount.point == "/" or mount.device not in host_devices:
            continue
        source = f"/dev{mount.root}" if mount.kind == "devtmpfs" else None
        externals.append(External(key=f"mount-{number}", point=mount.point, source=source))
    return tuple(externals)


class Workplace:
    """The private mount namespace, made once and copied for each run."""

    def __init__(self, *programs: str) -> None:
        """`programs` are those that are run here, wherever they lie."""
        self._programs = programs
        self._namespace = -1
        self._lock = threading.Lock()

    def run(self, work: Callable[[Home], T], *, name: str) -> T:
        """Do something in a thread of its own that has its own copy of the namespace.

        A thread, because a namespace is joined by the calling thread alone and children are born
        where their parent thread is; of its own, because it cannot come back. What must see the
        host's mounts on the way is given to `Home.run`.
        """
        with self._lock:
            if self._namespace < 0:
                self._namespace = in_thread(lambda _: self._make(), name="criu-workplace")
        namespace = self._namespace

        def inside(home: Home) -> T:
            syscalls.unshare(_CLONE_FS)
            syscalls.setns(namespace, syscalls.CLONE_NEWNS)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            return work(home)

        return in_thread(inside, name=name)

    def _make(self) -> int:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        with open("/proc/thread-self/mountinfo") as mountinfo:
            mounted = parse_mountinfo(mountinfo.read())
        for mount in reversed(mounted):
            needed = (*_KEPT, *self._programs)
            if not any(
                _is_below(path, mount.point) or _is_below(mount.point, path) for path in needed
            ):
                _let_go(mount.point)
        syscalls.mount("tmpfs", RUN, "tmpfs", syscalls.MS_NODEV | syscalls.MS_NOSUID, "mode=711")
        if not any(_is_below(program, TEMPORARY) for program in self._programs):
            # Where CRIU builds mount trees: what a killed one leaves there is not the host's.
            syscalls.mount("tmpfs", TEMPORARY, "tmpfs", syscalls.MS_NOSUID, "mode=1777")
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let the namespace go."""
        with self._lock:
            if self._namespace >= 0:
                os.close(self._namespace)
                self._namespace = -1


def _let_go(point: str) -> None:
    """Unmount here; a copy of a mount also goes when the host removes the directory below it."""
    try:
        syscalls.umount(point, syscalls.MNT_DETACH)
    except OSError as problem:
        if problem.errno not in (errno.ENOENT, errno.EINVAL):
            raise


def _is_below(path: str, above: str) -> bool:
    return above == "/" or path == above or path.startswith(f"{above}/")


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes for spaces and the like."""
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
