"""Messages of the launcher, as `native/launcher/launcher.c` reads them.

The launcher is a small C program because the cost of clone and exec grows with the memory of the
process. `launcher.py` starts it and sends the messages; those of skeletons are in `skeleton.py`.
"""

from msgspec import Struct

from paddock.runtime.local.launch.skeleton import Launch
from paddock.wire.seqpacket import pack

RANGE = 65536
"""Number of ids of a sandbox; the same constant is in `launcher.c`."""


class Prepare(Struct, frozen=True, kw_only=True):
    """Clone a skeleton; the descriptor with it is the skeleton's control socket."""

    base: int
    """First id of the sandbox's range."""
    cgroup: str | None = None
    joins: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the message as the launcher reads it."""
        return pack("P", str(self.base), self.cgroup or "", *self.joins)


class MakeRoot(Struct, frozen=True, kw_only=True):
    """Mount a root; the descriptor with it is the sandbox's user namespace.

    Without one, the launcher uses a temporary namespace with the same id map: the namespace of a
    restored sandbox is created later.
    """

    base: int
    layers: tuple[str, ...]
    """Highest first."""
    box: str
    """A directory with `upper` and `work`."""
    locked: bool = False
    binds: tuple[tuple[str, bool], ...] = ()
    """Directories of the host, and whether each is read-only."""
    volatile: bool = False

    def encode(self) -> bytes:
        """Return the message as the launcher reads it."""
        flags = ("l" if self.locked else "") + ("v" if self.volatile else "")
        binds = (part for source, is_fixed in self.binds for part in (_mode(is_fixed), source))
        layers = (str(len(self.layers)), *self.layers)
        return pack("R", str(self.base), flags, self.box, *layers, str(len(self.binds)), *binds)


class Start(Struct, frozen=True, kw_only=True):
    """Mount a root and pass it to a skeleton together with a `Launch` message.

    The descriptors with it are the user namespace and the node's end of the control socket.
    """

    root: MakeRoot
    launch: Launch

    def encode(self) -> bytes:
        """Return the message as the launcher reads it."""
        return self.root.encode() + self.launch.encode()


class LauncherReply(Struct, frozen=True, kw_only=True):
    """The result of a request; the descriptors with it are a pidfd, or mounts."""

    pid: int
    errno: int
    error: str


def decode_reply(data: bytes) -> LauncherReply:
    """Decode a reply of the launcher."""
    pid, errno, error = data.decode(errors="replace").split(" ", 2)
    return LauncherReply(pid=int(pid), errno=int(errno), error=error)


def _mode(is_fixed: bool) -> str:
    return "ro" if is_fixed else "rw"
