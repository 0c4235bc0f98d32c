"""Messages of the launcher and of skeletons, as `native/launcher/launcher.c` reads them.

The launcher is a small C program because the cost of clone and exec grows with the memory of the
process. `launcher.py` starts it and sends the messages.
"""

from msgspec import Struct

from paddock.wire.seqpacket import pack

RANGE = 65536
"""Number of ids of a sandbox; the same constant is in `launcher.c`."""

HIDDEN_FILES = (
    *("proc/buddyinfo", "proc/cgroups", "proc/cmdline", "proc/config.gz", "proc/diskstats"),
    *("proc/interrupts", "proc/iomem", "proc/kallsyms", "proc/keys", "proc/latency_stats"),
    *("proc/mdstat", "proc/modules", "proc/partitions", "proc/sched_debug", "proc/schedstat"),
    *("proc/softirqs", "proc/swaps", "proc/zoneinfo", "proc/sys/fs/aio-nr"),
    *("proc/sys/fs/dentry-state", "proc/sys/fs/file-nr", "proc/sys/fs/inode-nr"),
    *("proc/sys/fs/inode-state", "proc/sys/kernel/core_pattern", "proc/sys/kernel/pty/nr"),
)
HIDDEN_TREES = ("proc/bus", "proc/fs", "proc/irq", "proc/pressure")
"""World-readable paths that reveal facts of the machine or the activity of other sandboxes: kernel
command line and configuration, disks, devices, paths of images and swap files, counters of memory,
interrupts and open files. Programs find an empty file or directory there. /proc/vmstat, which
`vmstat` cannot do without, has zeros instead (`launcher.c`)."""
SHOWN_TREES = (
    *("sys/class/net", "sys/devices/system/cpu", "sys/devices/virtual/net", "sys/kernel/mm"),
)
"""What a sandbox sees of /sys. The rest reveals disks, devices and activity of the machine; it is
absent, but for the empty directories that init's layer has (`native_build.py`)."""
READY = b"ready"
"""The message of a skeleton that waits for a launch; any other message is an error."""


class Prepare(Struct, frozen=True, kw_only=True):
    """Clone a skeleton; the descriptor with it is the skeleton's control socket."""

    base: int
    """First id of the sandbox's range."""
    devices: str = ""
    """Directory in which its device files are created; empty for those of the machine."""
    cgroup: str | None = None
    joins: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the message as the launcher reads it."""
        return pack("P", str(self.base), self.devices, self.cgroup or "", *self.joins)


class MakeRoot(Struct, frozen=True, kw_only=True):
    """Mount a root; the descriptor with it is the sandbox's user namespace.

    Without one, the launcher uses a temporary namespace with the same id map: the namespace of a
    restored sandbox is created later.
    """

    base: int
    layers: tuple[str, ...]
    """Highest first."""
    disk: str
    """A directory with `upper` and `work`."""
    locked: bool = False
    host_directories: tuple[tuple[str, bool], ...] = ()
    """Directories of the host, and whether each is read-only; ids on the host are `SHARED_IDS`."""
    binds: tuple[str, ...] = ()
    """Files of the node, mounted read-only after the directories."""
    devices: tuple[str, ...] = ()
    """Device files, mounted after the binds; only for a restore."""
    volatile: bool = False

    def encode(self) -> bytes:
        """Return the message as the launcher reads it."""
        flags = ("l" if self.locked else "") + ("v" if self.volatile else "")
        modes = [(_mode(is_fixed), source) for source, is_fixed in self.host_directories]
        modes += [("file", source) for source in self.binds]
        modes += [("dev", source) for source in self.devices]
        binds = (part for pair in modes for part in pair)
        layers = (str(len(self.layers)), *self.layers)
        return pack("R", str(self.base), flags, self.disk, *layers, str(len(modes)), *binds)


class Launch(Struct, frozen=True, kw_only=True):
    """Become a sandbox's init. The descriptors are the root's mount and one mount per bind."""

    hostname: str
    locked: bool = False
    binds: tuple[str, ...] = ()
    """Mount points inside, one per bind."""
    overlay: str | None = None
    """Rootless only: options of the overlay that the skeleton mounts itself."""
    host_trees: tuple[str, ...] = ()
    """Rootless only: directories of the host to mount at the same path."""

    def encode(self) -> bytes:
        """Return the message as a skeleton reads it."""
        mode = "locked" if self.locked else "sudo"
        head = pack("L", self.hostname, mode, self.overlay or "")
        return head + _counted(self.binds) + _FIXED_LISTS + _counted(self.host_trees)


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
    return "host-ro" if is_fixed else "host-rw"


def _counted(items: tuple[str, ...]) -> bytes:
    return pack(str(len(items)), *items)


_FIXED_LISTS = b"".join(map(_counted, (SHOWN_TREES, HIDDEN_FILES, HIDDEN_TREES)))
