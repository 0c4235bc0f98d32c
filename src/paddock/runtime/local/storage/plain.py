"""Trees as plain directories: works on any file system, copies file by file.

Copies share blocks where the file system can (XFS, and btrfs below a directory). Disk use is
limited where the file system keeps project quotas.
"""

import os
import shutil
import subprocess
from pathlib import Path

from paddock.runtime.local.storage import btrfs_ioctl
from paddock.runtime.local.storage.backend import Abilities, Space, explained
from paddock.runtime.local.storage.project_quota import ProjectQuotas

_COPY_SECONDS = 3600


class PlainBackend:
    """Directories below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._quotas = ProjectQuotas(root)
        reason = self._quotas.unavailable_because()
        self._abilities = Abilities(
            can_limit_disk=reason is None, instant_snapshots=False, reason=reason or ""
        )

    @property
    def name(self) -> str:
        """Give the backend's name."""
        return "plain"

    @property
    def root(self) -> Path:
        """Give the directory trees are kept below."""
        return self._root

    @property
    def abilities(self) -> Abilities:
        """Say what it can do."""
        return self._abilities

    def create_tree(self, path: Path) -> None:
        """Make an empty directory."""
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise explained(error, f"making {path.name}") from error

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
            raise explained(error, f"copying {source.name}")

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with everything in it."""
        shutil.rmtree(path, ignore_errors=False)

    def limit_tree(self, path: Path, limit_bytes: int) -> None:
        """Give the tree a project of its own with that bound."""
        if not self._abilities.can_limit_disk:
            return
        try:
            self._quotas.limit(path, limit_bytes)
        except OSError as error:
            raise explained(error, f"limiting {path.name}") from error

    def used_bytes(self, path: Path) -> int:
        """Add up blocks, as `du` does."""
        total = 0
        for directory, _, names in os.walk(path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except FileNotFoundError:
                    continue
        return total

    def open_meter(self, path: Path) -> int | None:
        """Nothing counts as files are written."""
        return None

    def flush(self, path: Path) -> None:
        """Sync the file system."""
        btrfs_ioctl.sync_tree(path)

    def space(self) -> Space:
        """Measure the file system."""
        facts = os.statvfs(self._root)
        return Space(
            total_bytes=facts.f_blocks * facts.f_frsize,
            free_bytes=facts.f_bavail * facts.f_frsize,
        )

    def detach(self) -> None:
        """Nothing was done to the machine."""
