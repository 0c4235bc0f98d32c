"""The files that are mounted over files of /proc and /sys in a sandbox.

They are on a tmpfs of their own, one directory per slot, named as the slot's cgroups. The view
server (`server.py`) writes them when they are read, except the boot id, which is fixed. The uptime
is not among them: the sandbox's time namespace changes it (`native/launcher/launcher.c`).
"""

import contextlib
import os
import shutil
from pathlib import Path

from msgspec import Struct

from paddock.runtime.local.kernel import syscalls

POINTS = {
    "meminfo": "/proc/meminfo",
    "stat": "/proc/stat",
    "loadavg": "/proc/loadavg",
    "cpuinfo": "/proc/cpuinfo",
    "online": "/sys/devices/system/cpu/online",
    "possible": "/sys/devices/system/cpu/possible",
    "present": "/sys/devices/system/cpu/present",
    "boot_id": "/proc/sys/kernel/random/boot_id",
}
"""Mount points inside by file name; the names are also in `native/views/views.c`."""
_LIMITS = "limits"


class ShownLimits(Struct, frozen=True, kw_only=True):
    """The limits that a sandbox sees."""

    memory_bytes: int
    """0 is no limit: the machine's memory is shown."""
    cpus: int


class ViewFiles:
    """The tmpfs with the files of all slots."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def mount(self) -> None:
        """Mount the tmpfs; one of a previous node process is kept with its files."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        if not os.path.ismount(self.root):
            # inode64: the server recognizes a file by its inode number, which must not wrap.
            options = "mode=700,size=256m,nr_inodes=0,inode64"
            syscalls.mount("paddock-views", str(self.root), "tmpfs", 0, options)

    def unmount(self) -> None:
        """Unmount the tmpfs. No sandbox may be left."""
        if os.path.ismount(self.root):
            syscalls.umount(str(self.root), syscalls.MNT_DETACH)

    def create(
        self, name: str, limits: ShownLimits, boot_id: str, *, copy_machine: bool
    ) -> tuple[tuple[str, str], ...]:
        """Create the files of a slot; return the path and the mount point of each.

        `copy_machine` copies the machine's own files, while no view server runs.
        """
        directory = f"{self.root}/{name}"
        try:
            os.mkdir(directory)
        except FileExistsError:  # of a killed node; other files, so that old mounts stay apart
            shutil.rmtree(directory)
            os.mkdir(directory)
        self.limit(name, limits)
        for file, point in POINTS.items():
            content = f"{boot_id}\n".encode() if file == "boot_id" else b""
            if copy_machine and not content:
                content = Path(point).read_bytes()
            fd = os.open(f"{directory}/{file}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
            try:
                os.fchmod(fd, 0o444)
                os.write(fd, content)
            finally:
                os.close(fd)
        return tuple((f"{directory}/{file}", point) for file, point in POINTS.items())

    def limit(self, name: str, limits: ShownLimits) -> None:
        """Set the limits that are shown. A slot without files is left alone."""
        # A link, not a file: the server may not read files of this tmpfs (see `views.c`).
        target = f"{limits.memory_bytes}:{limits.cpus}"
        path = f"{self.root}/{name}/{_LIMITS}"
        with contextlib.suppress(FileNotFoundError):
            os.symlink(target, f"{path}.new")
            os.rename(f"{path}.new", path)

    def remove(self, name: str) -> None:
        """Remove the files of a slot; none is no error."""
        shutil.rmtree(f"{self.root}/{name}", ignore_errors=True)

    def names(self) -> set[str]:
        """Return the slots that have files."""
        return set(os.listdir(self.root)) if os.path.ismount(self.root) else set()
