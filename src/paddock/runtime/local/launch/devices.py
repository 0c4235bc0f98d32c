"""Device files of sandboxes: each sandbox has inodes of its own.

Locks, watches and times of a device file belong to its inode. With the machine's files in /dev, a
sandbox could see other users of the machine open them, and exchange messages with other sandboxes.
The files are on a tmpfs of the node, one directory per slot. The launcher creates those of a new
sandbox (`native/launcher/launcher.c`), this module those of a restored one.
"""

import contextlib
import logging
import os
import stat
from pathlib import Path

from paddock.kit.logs import fields
from paddock.runtime.local.kernel import syscalls

log = logging.getLogger(__name__)

DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
"""Numbers of the devices in every sandbox's /dev; the list is also in `launcher.c`."""


class DeviceFiles:
    """The tmpfs with the device files of all slots."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_usable = False

    def open(self) -> None:
        """Mount the tmpfs; one of a previous node process is kept.

        Where device files cannot be created (a node in a container without CAP_MKNOD, a node
        without root), sandboxes use those of the machine.
        """
        if os.geteuid() != 0:
            return
        self._root.mkdir(mode=0o700, exist_ok=True)
        if not os.path.ismount(self._root):
            flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
            options = "mode=700,size=16m,nr_inodes=0"
            syscalls.mount("paddock-devices", str(self._root), "tmpfs", flags, options)
        try:
            self._make(self._root / "probe")
            os.close(os.open(self._root / "probe" / "null", os.O_RDWR | os.O_CLOEXEC))
        except OSError as problem:
            log.warning(
                "sandboxes use the machine's device files", extra=fields(reason=problem.strerror)
            )
            return
        self._is_usable = True

    def unmount(self) -> None:
        """Unmount the tmpfs. No sandbox may be left."""
        if os.path.ismount(self._root):
            syscalls.umount(str(self._root), syscalls.MNT_DETACH)

    def directory(self, name: str) -> str:
        """Return the directory of a slot, for the launcher; empty if there are no own files."""
        return str(self._root / name) if self._is_usable else ""

    def create(self, name: str) -> tuple[tuple[str, str], ...]:
        """Create the files of a restored sandbox; return the path and mount point of each."""
        if not self._is_usable:
            return ()
        self._make(self._root / name)
        return tuple((str(self._root / name / device), f"/dev/{device}") for device in DEVICES)

    def _make(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        for device, numbers in DEVICES.items():
            path = directory / device
            with contextlib.suppress(FileNotFoundError):  # of the slot's last sandbox
                path.unlink()
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*numbers))
            path.chmod(0o666)
