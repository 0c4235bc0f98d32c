"""A btrfs in a sparse image file, for machines whose disk has another file system.

The image is created once below the state directory and mounted by the first node process. Later
processes find it mounted. It is mounted again after a reboot, and can grow while mounted.
"""

import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.runtime.local.storage import btrfs_ioctl
from paddock.runtime.local.storage.reserve import DiskReserve

MINIMUM_BYTES = 256 << 20
_LOOP_SET_CAPACITY = 0x4C07
_OPTIONS = "loop,noatime,nodev,nosuid,discard=async,metadata_ratio=8"
"""`metadata_ratio`: a new file system has 8 MiB of metadata and gets more when needed, but data may
have taken all chunks by then, and nothing can be created or deleted."""
_LOW_WATER = 0.1
_BALLOON = "balloon"
_BALLOON_STEP_BYTES = 16 << 20
"""The balloon changes by at least this much."""
_ATTEMPTS = 5
_GIB = 1 << 30


class BtrfsImageStatus(Struct, frozen=True, kw_only=True):
    """Sizes of the image."""

    image: Path
    size_bytes: int
    allocated_bytes: int


class BtrfsImage:
    """The image file and its mount."""

    def __init__(self, image: Path, mount_point: Path, reserve: DiskReserve | None = None) -> None:
        self._image = image
        self._mount_point = mount_point
        self._reserve = reserve or DiskReserve(image.parent)

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
        disk = self._reserve.status()
        return max(0, disk.free_bytes - disk.reserve_bytes)

    def ensure_room(self) -> None:
        """Grow the image if it is nearly full and the disk has more."""
        stat = os.statvfs(self._mount_point)
        if stat.f_bavail < stat.f_blocks * _LOW_WATER:
            size, free = self._image.stat().st_size, stat.f_bavail * stat.f_frsize
            more = self.disk_free_bytes() - free - self._balloon_bytes()
            self.grow(size + min(size, max(0, more)))

    def fit_to_disk(self) -> None:
        """Let sandboxes write no more than the disk below has.

        A sparse file that cannot grow returns input/output errors, which damage its file system.
        So a balloon, a file of allocated but unwritten space, takes what the disk below could not
        hold: it costs no space there, and sandboxes get `ENOSPC` in time. What they write makes
        both file systems smaller by the same amount, so only other changes of the disk matter.
        """
        stat = os.statvfs(self._mount_point)
        free, balloon = stat.f_bavail * stat.f_frsize, self._balloon_bytes()
        wanted = max(0, free + balloon - self._reserve.writable_bytes())
        if abs(wanted - balloon) < _BALLOON_STEP_BYTES and wanted:
            return
        if wanted == balloon:
            return
        fd = os.open(self._balloon, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._resize_balloon(fd, balloon, wanted)
        finally:
            os.close(fd)
        # Free space is counted per transaction: the next call must not see the old one.
        btrfs_ioctl.sync_tree(self._mount_point)

    @staticmethod
    def _resize_balloon(fd: int, balloon: int, wanted: int) -> None:
        if wanted < balloon:
            os.ftruncate(fd, wanted)
            return
        # In steps: one large call takes all chunks for data, and leaves none for metadata.
        for start in range(balloon, wanted, _BALLOON_STEP_BYTES):
            try:
                os.posix_fallocate(fd, start, min(_BALLOON_STEP_BYTES, wanted - start))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return  # sandboxes were faster: nothing is left to take

    @property
    def _balloon(self) -> Path:
        return self._mount_point / _BALLOON

    def _balloon_bytes(self) -> int:
        try:
            return self._balloon.stat().st_size
        except FileNotFoundError:
            return 0

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
