"""The port between the Storage facade and its backends.

A backend creates, copies and removes directory trees below its root and measures them. The facade
handles names, records, trash and idempotency.
"""

import errno
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from paddock.kit.errors import DiskFullError, PaddockError, UnavailableError


class StorageCapabilities(Struct, frozen=True, kw_only=True):
    """The capabilities of a backend."""

    can_limit_disk: bool
    instant_snapshots: bool
    reason: str = ""
    """Why disk use cannot be limited, and what to do about it."""


class Space(Struct, frozen=True, kw_only=True):
    """Size of the file system of a backend."""

    total_bytes: int
    free_bytes: int


class Backend(Protocol):
    """Stores directory trees; paths are absolute and below `root`."""

    @property
    def name(self) -> str:
        """`btrfs` or `plain`."""
        ...

    @property
    def root(self) -> Path:
        """The directory that contains all trees."""
        ...

    @property
    def capabilities(self) -> StorageCapabilities: ...

    @property
    def shares_disk(self) -> bool:
        """Whether what trees hold takes space of the file system of the store directly."""
        ...

    @property
    def charges_writers(self) -> bool:
        """Whether copies share bytes, which stay charged to the tree that wrote them."""
        ...

    @property
    def can_tighten(self) -> bool:
        """Whether usage and limit of a tree are known and changed at once."""
        ...

    def create_tree(self, path: Path) -> None:
        """Create an empty tree."""
        ...

    def copy_tree(self, source: Path, target: Path) -> None:
        """Copy a tree; on failure no partial copy remains."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a tree; may be slow."""
        ...

    def limit_tree(self, path: Path, limit_bytes: int) -> None:
        """Limit what may be written below path from now on; 0 means no limit."""
        ...

    def used_bytes(self, path: Path) -> int:
        """Return the bytes written by the tree itself."""
        ...

    def open_usage_counter(self, path: Path) -> int | None:
        """Open a file that contains `used_bytes`, or return `None` if there is none."""
        ...

    def flush(self, path: Path) -> None:
        """Write out dirty data, so that a copy right afterwards is fast and complete."""
        ...

    def space(self) -> Space:
        """Return the size of the file system."""
        ...

    def fit_to_disk(self) -> None:
        """Let sandboxes write no more than the disk has; called at intervals."""
        ...

    def detach(self) -> None:
        """Undo the mounts of opening; all data is kept."""
        ...


def storage_error(error: OSError, what: str) -> PaddockError:
    """Convert an error of the file system to one with a hint."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"{what}: no space left on the disk",
            hint="delete sandboxes, checkpoints or images, or enlarge the disk",
        )
    if error.errno == errno.EROFS:
        return UnavailableError(
            f"{what}: the file system became read-only, most likely after an input/output error",
            hint="read the kernel log (dmesg), then restart the node",
        )
    return UnavailableError(f"{what}: {error.strerror or error}")
