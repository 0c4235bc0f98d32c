"""Keeps the reserve of a disk whose file system sandboxes share with the store.

That is so on plain directories and on a disk that is btrfs itself; an image has a balloon instead
(`btrfs_image`). Below the reserve, quota groups of btrfs are limited to what may still be written.
Without such limits, the sandbox that writes most must end when half of the reserve is left.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from paddock.runtime.local.storage.backend import Backend
from paddock.runtime.local.storage.reserve import DiskReserve, DiskStatus

_LEAST_BYTES = 4096
"""A limit of 0 is none."""


class Tree(Struct, frozen=True):
    """The files of one sandbox."""

    path: Path
    limit_bytes: int
    """Its own limit; 0 is none."""


def tight_limits(
    used: Mapping[str, int], limits: Mapping[str, int], writable_bytes: int
) -> dict[str, int]:
    """Return the limit of each tree, so that all of them together write no more than this."""
    share = writable_bytes // max(len(used), 1)
    bounds = {name: max(size + share, _LEAST_BYTES) for name, size in used.items()}
    return {name: min(bound, limits[name] or bound) for name, bound in bounds.items()}


def fastest_writer(before: Mapping[str, int], now: Mapping[str, int]) -> str | None:
    """Return the tree that has grown most, or `None` if none of both has grown."""
    growth = {name: size - before[name] for name, size in now.items() if name in before}
    fastest = max(growth, key=lambda name: growth[name], default=None)
    return fastest if fastest is not None and growth[fastest] > 0 else None


def dirty_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the size of data that waits to be written to any disk of the machine."""
    rows = (line.split() for line in meminfo.read_text().splitlines())
    return sum(int(row[1]) << 10 for row in rows if row[0] in ("Dirty:", "Writeback:"))


class SharedDisk:
    """Bounds what running sandboxes write."""

    def __init__(self, backend: Backend, reserve: DiskReserve) -> None:
        self._backend = backend
        self._reserve = reserve
        self._is_tight = True
        """At first, limits may be those of an earlier process."""
        self._used: dict[str, int] = {}

    @property
    def is_tight(self) -> bool:
        """Whether trees have other limits than their own."""
        return self._is_tight

    def keep(self, trees: Callable[[], Mapping[str, Tree]], disk: DiskStatus) -> str | None:
        """Limit the trees; return the one whose sandbox must end, if any. Called at intervals."""
        if not self._backend.shares_disk:
            return None
        # btrfs counts data that is not yet on disk as free.
        pending = dirty_bytes()
        is_near = disk.free_bytes - pending < disk.reserve_bytes
        if self._backend.can_tighten:
            if is_near and not disk.is_low:
                self._tighten(trees, self._reserve.writable_bytes(pending))
                self._backend.flush(self._backend.root)
            self._keep_limits(trees, self._reserve.status())
            return None
        if not is_near:
            self._used = {}
            return None
        before = self._used or self._usage(trees())
        if not disk.is_low:
            self._backend.flush(self._backend.root)
        self._used = self._usage(trees())
        if not self._reserve.status().is_low or self._reserve.writable_bytes(dirty_bytes()):
            return None
        return fastest_writer(before, self._used)

    def _keep_limits(self, trees: Callable[[], Mapping[str, Tree]], disk: DiskStatus) -> None:
        if disk.is_low or (self._is_tight and not disk.has_room):
            self._tighten(trees, self._reserve.writable_bytes())
        elif self._is_tight:
            for tree in trees().values():
                self._backend.limit_tree(tree.path, tree.limit_bytes)
            self._is_tight = False

    def _tighten(self, trees: Callable[[], Mapping[str, Tree]], writable_bytes: int) -> None:
        found = trees()
        limits = {name: tree.limit_bytes for name, tree in found.items()}
        for name, bound in tight_limits(self._usage(found), limits, writable_bytes).items():
            self._backend.limit_tree(found[name].path, bound)
        self._is_tight = True

    def _usage(self, trees: Mapping[str, Tree]) -> dict[str, int]:
        return {name: self._backend.used_bytes(tree.path) for name, tree in trees.items()}
