"""Backend that stores trees as plain directories: works on any file system, copies file by file.

Copies share blocks if the file system supports it (XFS, and btrfs below a directory). Disk use is
limited if the file system has project quotas.
"""

import os
import shutil
import subprocess
from pathlib import Path

from paddock.runtime.local.storage import btrfs_ioctl
from paddock.runtime.local.storage.backend import Space, StorageCapabilities, storage_error
from paddock.runtime.local.storage.project_quota import ProjectQuotas

_COPY_SECONDS = 3600


class PlainBackend:
    """Directories below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._quotas = ProjectQuotas(root)
        reason = self._quotas.unavailable_reason()
        self._capabilities = StorageCapabilities(
            can_limit_disk=reason is None, instant_snapshots=False, reason=reason or ""
        )

    @property
    def name(self) -> str:
        return "plain"

    @property
    def root(self) -> Path:
        return self._root

    @property
    def capabilities(self) -> StorageCapabilities:
        return self._capabilities

    @property
    def shares_disk(self) -> bool:
        return True

    @property
    def charges_writers(self) -> bool:
        """A copy shares nothing."""
        return False

    @property
    def can_tighten(self) -> bool:
        """Return `False`: a change of a limit visits every file of the tree."""
        return False

    def create_tree(self, path: Path) -> None:
        """Create an empty directory."""
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise storage_error(error, f"cannot create {path.name}") from error

    def copy_tree(self, source: Path, target: Path) -> None:
        """Copy with owners, links, device nodes and extended attributes."""
        done = subprocess.run(
            ["cp", "-a", "--reflink=auto", "-T", str(source), str(target)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COPY_SECONDS,
        )
        if done.returncode != 0:
            shutil.rmtree(target, ignore_errors=True)
            no_room = "No space left" in done.stderr or "quota exceeded" in done.stderr
            error = OSError(28 if no_room else 5, done.stderr.strip()[-500:])
            raise storage_error(error, f"cannot copy {source.name}")

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=False)

    def limit_tree(self, path: Path, limit_bytes: int) -> None:
        """Assign a project to the tree and set its limit."""
        if not self._capabilities.can_limit_disk:
            return
        try:
            self._quotas.limit(path, limit_bytes)
        except OSError as error:
            raise storage_error(error, f"cannot limit {path.name}") from error

    def used_bytes(self, path: Path) -> int:
        """Return the sum of allocated blocks, as `du` does."""
        total = 0
        for directory, _, names in os.walk(path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except FileNotFoundError:
                    continue
        return total

    def open_usage_counter(self, path: Path) -> int | None:
        """Return `None`: plain directories have no counter."""
        return None

    def flush(self, path: Path) -> None:
        """Sync the file system."""
        btrfs_ioctl.sync_tree(path)

    def space(self) -> Space:
        """Return the size of the file system."""
        stat = os.statvfs(self._root)
        return Space(
            total_bytes=stat.f_blocks * stat.f_frsize,
            free_bytes=stat.f_bavail * stat.f_frsize,
        )

    def fit_to_disk(self) -> None:
        """Do nothing: there is no image."""

    def detach(self) -> None:
        """Do nothing: there is no mount."""
