"""What a skeleton is told to become, and what every sandbox has and has not.

A skeleton is a child of the launcher: it has namespaces, groups and detached filesystems, and
waits; it may be parked like that. Told of a root (`Launch`), it puts everything in its place,
pivots and becomes init. How is in `launch/launcher.c`.
"""

from msgspec import Struct

from paddock.wire.seqpacket import pack

INIT_PATH = "/.paddock/init"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""What every sandbox has in /dev. The program knows them, too, as it does where init is."""
HIDDEN_FILES = ("proc/cmdline", "proc/interrupts", "proc/keys", "proc/swaps")
HIDDEN_TREES = ("sys/devices/virtual/block", "sys/devices/virtual/powercap", "sys/firmware")
"""What anybody may read and no sandbox should: what the machine was started with, where its images
and swap files lie, how busy its devices are."""
READY = b"ready"
"""What a skeleton says when it waits to be told what to become; anything else is why it failed."""


class Launch(Struct, frozen=True, kw_only=True):
    """Become a sandbox. The first descriptor is the root's mount, one more follows per bind."""

    hostname: str
    locked: bool = False
    binds: tuple[str, ...] = ()
    """Where directories from outside are seen inside."""
    overlay: str | None = None
    """Rootless: the options of an overlay to be mounted here, as no one could do it outside."""
    host_trees: tuple[str, ...] = ()
    """Rootless: directories of the host that are seen at their own place."""

    def encode(self) -> bytes:
        """Write it as a skeleton reads it."""
        mode = "locked" if self.locked else "sudo"
        lists = (self.binds, HIDDEN_FILES, HIDDEN_TREES, self.host_trees)
        counted = (part for one in lists for part in (str(len(one)), *one))
        return pack("L", self.hostname, mode, self.overlay or "", *counted)
