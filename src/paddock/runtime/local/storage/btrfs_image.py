"""A btrfs in a sparse image file, for machines whose disk has another file system.

The image is created once below the state directory and mounted by the first node process. Later
processes find it mounted. It is mounted again after a reboot, and can grow while mounted.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.runtime.local.storage import btrfs_ioctl

MINIMUM_BYTES = 256 << 20
_LOOP_SET_CAPACITY = 0x4C07
_OPTIONS = "loop,noatime,nodev,nosuid,discard=async"
_RESERVE_BYTES = 256 << 20
"""Reserve on the disk below the image: a sparse file that cannot grow corrupts its file system."""
_LOW_WATER = 0.1
_ATTEMPTS = 5
_GIB = 1 << 30


class BtrfsImageStatus(Struct, frozen=True, kw_only=True):
    """Sizes of the image."""

    image: Path
    size_bytes: int
    allocated_bytes: int


class BtrfsImage:
    """The image file and its mount."""

    def __init__(self, image: Path, mount_point: Path) -> None:
        self._image = image
        self._mount_point = mount_point

    @property
    def mount_point(self) -> Path:
        return self._mount_point

    def open(self, size_bytes: int | None = None) -> None:
        """Create and mount the image, unless that is done already."""
        self._image.parent.mkdir(parents=True, exist_ok=True)
        self._mount_point.mkdir(parents=True, exist_ok=True)
        with (self._image.parent / f"{self._image.name}.lock").open("w") as lock:
            # Two node processes may overlap for a moment while one replaces the other.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.ismount(self._mount_point):
                return
            if not self._image.exists():
                self._make(size_bytes or self._default_size())
            self._mount()

    def unmount(self) -> None:
        """Unmount the file system; the image is kept. No sandbox may use it."""
        if os.path.ismount(self._mount_point):
            _run(["umount", str(self._mount_point)], "unmounting the btrfs image")

    def status(self) -> BtrfsImageStatus:
        """Return the sizes of the image."""
        stat = self._image.stat()
        return BtrfsImageStatus(
            image=self._image, size_bytes=stat.st_size, allocated_bytes=stat.st_blocks * 512
        )

    def disk_free_bytes(self) -> int:
        """Free bytes of the disk below the image, less the reserve."""
        stat = os.statvfs(self._image.parent)
        return max(0, stat.f_bavail * stat.f_frsize - _RESERVE_BYTES)

    def ensure_room(self) -> None:
        """Grow the image if it is nearly full. Raises `UnavailableError` if the disk is full."""
        if self.disk_free_bytes() <= 0:
            raise UnavailableError(
                f"the disk that holds {self._image} is full",
                hint="delete sandboxes, checkpoints or images, or enlarge the disk",
            )
        stat = os.statvfs(self._mount_point)
        if stat.f_bavail < stat.f_blocks * _LOW_WATER:
            size = self._image.stat().st_size
            self.grow(size + min(size, self.disk_free_bytes()))

    def grow(self, size_bytes: int) -> None:
        """Grow the image and the mounted file system; never shrink."""
        if size_bytes <= self._image.stat().st_size:
            return
        os.truncate(self._image, size_bytes)
        device = self._device()
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _LOOP_SET_CAPACITY)
        finally:
            os.close(fd)
        btrfs_ioctl.grow_to_device(self._mount_point)

    def _device(self) -> str:
        target = str(self._mount_point.resolve())
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[4].encode().decode("unicode_escape") == target:
                return after.split()[1]
        raise UnavailableError(f"the btrfs image is not mounted at {target}")

    def _default_size(self) -> int:
        """Return 90 % of the free space: the file is sparse, so unused size costs nothing."""
        return max(2 * _GIB, int(self.disk_free_bytes() * 0.9) // _GIB * _GIB)

    def _make(self, size_bytes: int) -> None:
        if not shutil.which("mkfs.btrfs"):
            raise UnsupportedError(
                "mkfs.btrfs is not installed", hint="apt-get install btrfs-progs"
            )
        # Created under another name and renamed: an image is always complete.
        fresh = self._image.with_suffix(".new")
        with fresh.open("wb") as file:
            file.truncate(max(size_bytes, MINIMUM_BYTES))
        fresh.chmod(0o600)
        command = ["mkfs.btrfs", "--quiet", "--force", "--metadata", "single", str(fresh)]
        for left in reversed(range(_ATTEMPTS)):
            try:
                _run(command, "creating the btrfs image")
                break
            except UnavailableError as refused:
                # mkfs checks whether the file is mounted by reading every mounted loop device,
                # and fails if one of them is unmounted in between.
                if not left or "mount status" not in refused.message:
                    raise
        fresh.rename(self._image)

    def _mount(self) -> None:
        _run(
            ["mount", "-t", "btrfs", "-o", _OPTIONS, str(self._image), str(self._mount_point)],
            "mounting the btrfs image",
        )


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise UnavailableError(f"{what} failed: {done.stderr.strip() or done.stdout.strip()}")
