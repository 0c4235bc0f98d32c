"""Backend that stores trees as btrfs subvolumes: copies are snapshots, limits are quota groups.

The file system is that of a state directory on btrfs, or an image that `btrfs_image` creates
and mounts.
"""

import contextlib
import os
import shutil
from pathlib import Path

from paddock.runtime.local.storage import btrfs_ioctl
from paddock.runtime.local.storage.backend import Space, StorageCapabilities, storage_error
from paddock.runtime.local.storage.btrfs_image import BtrfsImage

_NO_QUOTAS = "quotas could not be enabled on this btrfs: {}"


class BtrfsBackend:
    """Subvolumes below one directory of a btrfs."""

    def __init__(self, root: Path, *, image: BtrfsImage | None = None) -> None:
        self._root = root
        self._image = image
        self._sysfs = Path("/sys/fs/btrfs") / btrfs_ioctl.file_system_id(root) / "qgroups"
        try:
            self._simple = btrfs_ioctl.enable_quotas(root)
        except OSError as error:
            self._capabilities = StorageCapabilities(
                can_limit_disk=False,
                instant_snapshots=True,
                reason=_NO_QUOTAS.format(error.strerror),
            )
        else:
            self._capabilities = StorageCapabilities(can_limit_disk=True, instant_snapshots=True)

    @property
    def name(self) -> str:
        return "btrfs"

    @property
    def root(self) -> Path:
        return self._root

    @property
    def capabilities(self) -> StorageCapabilities:
        return self._capabilities

    @property
    def shares_disk(self) -> bool:
        """Whether it is the file system of the state directory, not an image."""
        return self._image is None

    @property
    def charges_writers(self) -> bool:
        """Whether bytes that a snapshot keeps stay charged to the tree that wrote them."""
        return self._capabilities.can_limit_disk and self._simple

    @property
    def can_tighten(self) -> bool:
        return self._capabilities.can_limit_disk

    def create_tree(self, path: Path) -> None:
        """Create an empty subvolume."""
        self._ensure_room()
        try:
            btrfs_ioctl.create_subvolume(path)
        except OSError as error:
            raise storage_error(error, f"cannot create {path.name}") from error

    def copy_tree(self, source: Path, target: Path) -> None:
        """Snapshot a subvolume."""
        self._ensure_room()
        try:
            btrfs_ioctl.snapshot(source, target)
        except OSError as error:
            raise storage_error(error, f"cannot copy {source.name}") from error

    def remove_tree(self, path: Path) -> None:
        """Destroy the subvolume and its quota group."""
        if not btrfs_ioctl.is_subvolume(path):
            shutil.rmtree(path, ignore_errors=True)
            return
        identifier = btrfs_ioctl.subvolume_id(path)
        btrfs_ioctl.destroy_subvolume(path)
        with contextlib.suppress(OSError):
            # Busy until the kernel has freed the blocks; `drop_stale_groups` removes it later.
            btrfs_ioctl.drop_qgroup(self._root, identifier)

    def limit_tree(self, path: Path, limit_bytes: int) -> None:
        """Set the limit of the quota group."""
        if not self._capabilities.can_limit_disk:
            return
        try:
            btrfs_ioctl.limit_subvolume(self._root, path, limit_bytes)
        except OSError as error:
            raise storage_error(error, f"cannot limit {path.name}") from error

    def used_bytes(self, path: Path) -> int:
        """Return the bytes charged to the quota group."""
        try:
            return int(self._meter(path).read_text())
        except (OSError, ValueError):
            return 0

    def open_usage_counter(self, path: Path) -> int | None:
        """Open the counter of the quota group."""
        try:
            return os.open(self._meter(path), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _meter(self, path: Path) -> Path:
        return self._sysfs / f"0_{btrfs_ioctl.subvolume_id(path)}" / "referenced"

    def flush(self, path: Path) -> None:
        """Sync the file system, so that the next snapshot has little to write."""
        btrfs_ioctl.sync_tree(path)

    def space(self) -> Space:
        """Return the size of the file system; free space is limited by the disk below the image."""
        stat = os.statvfs(self._root)
        free = stat.f_bavail * stat.f_frsize
        if self._image is not None:
            free = min(free, self._image.disk_free_bytes())
        return Space(total_bytes=stat.f_blocks * stat.f_frsize, free_bytes=free)

    def drop_stale_groups(self, living: frozenset[int]) -> int:
        """Remove quota groups whose subvolumes are gone; return their number."""
        dropped = 0
        with contextlib.suppress(FileNotFoundError):
            for entry in os.listdir(self._sysfs):
                level, _, identifier = entry.partition("_")
                if level != "0" or not identifier.isdigit() or int(identifier) < 256:
                    continue
                if int(identifier) in living:
                    continue
                with contextlib.suppress(OSError):
                    # The kernel refuses this while the group has a subvolume or charges.
                    btrfs_ioctl.drop_qgroup(self._root, int(identifier))
                    dropped += 1
        return dropped

    def fit_to_disk(self) -> None:
        """Keep the image from promising more than the disk below it has."""
        if self._image is not None:
            self._image.fit_to_disk()

    def detach(self) -> None:
        """Unmount the image, if there is one."""
        if self._image is not None:
            self._image.unmount()

    def _ensure_room(self) -> None:
        if self._image is not None:
            self._image.ensure_room()
