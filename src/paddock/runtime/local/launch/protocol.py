"""What the launcher understands, as `launch/launcher.c` reads it; skeletons are in `skeleton`.

It is a tiny C program: cloning costs what the parent weighs, and becoming init what the child
weighs. Starting it and talking to it is the business of `launching`.
"""

from msgspec import Struct

from paddock.runtime.local.launch.skeleton import Launch
from paddock.wire.seqpacket import pack

RANGE = 65536
"""So many ids every sandbox has; the launcher knows it, too."""


class Prepare(Struct, frozen=True, kw_only=True):
    """Clone a skeleton; the descriptor sent along is its control socket."""

    base: int
    """First id of the range that is the sandbox's own."""
    cgroup: str | None = None
    joins: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Write it as the launcher reads it."""
        return pack("P", str(self.base), self.cgroup or "", *self.joins)


class MakeRoot(Struct, frozen=True, kw_only=True):
    """Mount a root; the descriptor sent along is the sandbox's user namespace.

    Without one a stand-in with the same map is used: a restored sandbox's own comes later.
    """

    base: int
    layers: tuple[str, ...]
    """Highest first."""
    box: str
    """A directory with `upper` and `work`."""
    locked: bool = False
    binds: tuple[tuple[str, bool], ...] = ()
    """Directories of the host, and whether they are read-only."""
    volatile: bool = False

    def encode(self) -> bytes:
        """Write it as the launcher reads it."""
        flags = ("l" if self.locked else "") + ("v" if self.volatile else "")
        binds = (part for source, is_fixed in self.binds for part in (_mode(is_fixed), source))
        layers = (str(len(self.layers)), *self.layers)
        return pack("R", str(self.base), flags, self.box, *layers, str(len(self.binds)), *binds)


class Start(Struct, frozen=True, kw_only=True):
    """Mount a root and hand it to a skeleton, with word what to become.

    The descriptors sent along are its user namespace and our end of its control socket.
    """

    root: MakeRoot
    launch: Launch

    def encode(self) -> bytes:
        """Write it as the launcher reads it."""
        return self.root.encode() + self.launch.encode()


class Reply(Struct, frozen=True, kw_only=True):
    """What became of a request; descriptors come along: pidfd, or mounts."""

    pid: int
    errno: int
    error: str


def decode_reply(data: bytes) -> Reply:
    """Read the launcher's answer."""
    pid, errno, error = data.decode(errors="replace").split(" ", 2)
    return Reply(pid=int(pid), errno=int(errno), error=error)


def _mode(is_fixed: bool) -> str:
    return "ro" if is_fixed else "rw"
