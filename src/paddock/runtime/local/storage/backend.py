"""The port between the Storage facade and a way of keeping directory trees.

A backend makes, copies and removes trees below its own root and knows what they use. Names,
sidecar files, trash and idempotence are the facade's.
"""

import errno
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from paddock.kit.errors import PaddockError, UnavailableError


class Abilities(Struct, frozen=True, kw_only=True):
    """What a backend can do, and why not where it cannot."""

    can_limit_disk: bool
    instant_snapshots: bool
    reason: str = ""
    """Why disk use cannot be limited, with what would help."""


class Space(Struct, frozen=True, kw_only=True):
    """Bytes of the place where trees are kept."""

    total_bytes: int
    free_bytes: int


class Backend(Protocol):
    """A way of keeping trees; paths are absolute and below `root`."""

    @property
    def name(self) -> str:
        """`btrfs` or `plain`."""
        ...

    @property
    def root(self) -> Path:
        """The directory trees are kept below."""
        ...

    @property
    def abilities(self) -> Abilities:
        """Say what it can do."""
        ...

    def create_tree(self, path: Path) -> None:
        """Make an empty tree."""
        ...

    def copy_tree(self, source: Path, target: Path) -> None:
        """Make target a copy of source as it is now; on an error nothing of it remains."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a tree with everything in it; may be slow."""
        ...

    def limit_tree(self, path: Path, limit_bytes: int) -> None:
        """Bound what is written below path from now on; 0 is no bound."""
        ...

    def used_bytes(self, path: Path) -> int:
        """Measure what the tree itself wrote."""
        ...

    def open_meter(self, path: Path) -> int | None:
        """Open a file that says so whenever it is read, where there is one."""
        ...

    def flush(self, path: Path) -> None:
        """Write out what is dirty, so that a copy right after it is quick and whole."""
        ...

    def space(self) -> Space:
        """Measure the place."""
        ...

    def detach(self) -> None:
        """Undo what opening did to the machine (mounts), keeping all data."""
        ...


def explained(error: OSError, what: str) -> PaddockError:
    """Turn a file system's refusal into something a person can act on."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(
            f"{what}: there is no room left on the disk",
            hint="delete sandboxes, checkpoints or images, or enlarge the disk",
        )
    if error.errno == errno.EROFS:
        return UnavailableError(
            f"{what}: the file system became read-only, most likely after an input/output error",
            hint="look at the kernel log (dmesg), then restart the node",
        )
    return UnavailableError(f"{what}: {error.strerror or error}")
