"""Trees as btrfs subvolumes: copies are snapshots, limits are quota groups.

The file system itself is found (a state directory on btrfs) or made and mounted by `pool`.
"""

import contextlib
import os
import shutil
from pathlib import Path

from paddock.runtime.local.storage import btrfs_ioctl
from paddock.runtime.local.storage.backend import Abilities, Space, explained
from paddock.runtime.local.storage.pool import Pool

_NO_QUOTAS = "quotas could not be switched on for this btrfs: {}"


class BtrfsBackend:
    """Subvolumes below one directory of one btrfs."""

    def __init__(self, root: Path, *, pool: Pool | None = None) -> None:
        self._root = root
        self._pool = pool
        self._sysfs = Path("/sys/fs/btrfs") / btrfs_ioctl.file_system_id(root) / "qgroups"
        try:
            self._simple = btrfs_ioctl.enable_quotas(root)
        except OSError as error:
            self._abilities = Abilities(
                can_limit_disk=False,
                instant_snapshots=True,
                reason=_NO_QUOTAS.format(error.strerror),
            )
        else:
            self._abilities = Abilities(can_limit_disk=True, instant_snapshots=True)

    @property
    def name(self) -> str:
        """Give the backend's name."""
        return "btrfs"

    @property
    def root(self) -> Path:
        """Give the directory subvolumes are kept below."""
        return self._root

    @property
    def abilities(self) -> Abilities:
        """Say what it can do."""
        return self._abilities

    def create_tree(self, path: Path) -> None:
        """Make an empty subvolume."""
        self._make_room()
        try:
            btrfs_ioctl.create_subvolume(path)
        except OSError as error:
            raise explained(error, f"making {path.name}") from error

    def copy_tree(self, source: Path, target: Path) -> None:
        """Snapshot a subvolume."""
        self._make_room()
        try:
            btrfs_ioctl.snapshot(source, target)
        except OSError as error:
            raise explained(error, f"copying {source.name}") from error

    def remove_tree(self, path: Path) -> None:
        """Destroy the subvolume; its quota group goes when the kernel has freed its blocks."""
        if not btrfs_ioctl.is_subvolume(path):
            shutil.rmtree(path, ignore_errors=True)
            return
        identifier = btrfs_ioctl.subvolume_id(path)
        btrfs_ioctl.destroy_subvolume(path)
        with contextlib.suppress(OSError):
            # Still busy while blocks are being freed; `drop_stale_groups` gets it later.
            btrfs_ioctl.drop_qgroup(self._root, identifier)

    def limit_tree(self, path: Path, limit_bytes: int) -> None:
        """Set the quota group's bound."""
        if not self._abilities.can_limit_disk:
            return
        try:
            btrfs_ioctl.limit_subvolume(path, limit_bytes)
        except OSError as error:
            raise explained(error, f"limiting {path.name}") from error

    def used_bytes(self, path: Path) -> int:
        """Read what the quota group was charged with."""
        try:
            return int(self._meter(path).read_text())
        except (OSError, ValueError):
            return 0

    def open_meter(self, path: Path) -> int | None:
        """Open the quota group's count."""
        try:
            return os.open(self._meter(path), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _meter(self, path: Path) -> Path:
        return self._sysfs / f"0_{btrfs_ioctl.subvolume_id(path)}" / "referenced"

    def flush(self, path: Path) -> None:
        """Sync the file system, so that the next snapshot has little left to write."""
        btrfs_ioctl.sync_tree(path)

    def space(self) -> Space:
        """Measure the pool, bounded by the disk its image lies on."""
        facts = os.statvfs(self._root)
        free = facts.f_bavail * facts.f_frsize
        if self._pool is not None:
            free = min(free, self._pool.disk_free_bytes())
        return Space(total_bytes=facts.f_blocks * facts.f_frsize, free_bytes=free)

    def drop_stale_groups(self, living: frozenset[int]) -> int:
        """Forget quota groups whose subvolumes are gone; give how many."""
        dropped = 0
        with contextlib.suppress(FileNotFoundError):
            for entry in os.listdir(self._sysfs):
                level, _, identifier = entry.partition("_")
                if level != "0" or not identifier.isdigit() or int(identifier) < 256:
                    continue
                if int(identifier) in living:
                    continue
                with contextlib.suppress(OSError):
                    # Refused while it has a subvolume or is still charged: both are right.
                    btrfs_ioctl.drop_qgroup(self._root, int(identifier))
                    dropped += 1
        return dropped

    def detach(self) -> None:
        """Unmount the pool where it is ours."""
        if self._pool is not None:
            self._pool.unmount()

    def _make_room(self) -> None:
        if self._pool is not None:
            self._pool.ensure_room()
