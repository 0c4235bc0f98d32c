"""The launch message of a skeleton, and the devices and hidden paths of every sandbox.

A skeleton is a child of the launcher with namespaces, cgroups and detached file systems; it can
wait in the warm stock. On a `Launch` message it mounts everything, pivots into its root and becomes
init (`native/launcher/launcher.c`).
"""

from msgspec import Struct

from paddock.wire.seqpacket import pack

INIT_PATH = "/.paddock/init"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""Devices in every sandbox's /dev; the list and the path of init are also in `launcher.c`."""
HIDDEN_FILES = ("proc/cmdline", "proc/interrupts", "proc/keys", "proc/swaps")
HIDDEN_TREES = ("sys/devices/virtual/block", "sys/devices/virtual/powercap", "sys/firmware")
"""World-readable paths that reveal facts of the machine: kernel command line, paths of images and
swap files, device activity."""
READY = b"ready"
"""The message of a skeleton that waits for a launch; any other message is an error."""


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
        lists = (self.binds, HIDDEN_FILES, HIDDEN_TREES, self.host_trees)
        counted = (part for one in lists for part in (str(len(one)), *one))
        return pack("L", self.hostname, mode, self.overlay or "", *counted)
