"""The reserve of a disk: space that is kept free for the store and for running sandboxes.

New work (sandboxes, snapshots, hibernations, images) is refused below the reserve. Running
sandboxes can write until half of it is left: the other half is for the store and for records.
"""

import logging
import os
from pathlib import Path

from msgspec import Struct

from paddock.kit import metrics
from paddock.kit.errors import DiskFullError
from paddock.kit.logs import fields
from paddock.resources.quantity import shown_bytes

log = logging.getLogger(__name__)

_FREE = metrics.gauge("paddock_disk_free_bytes", "Free bytes of the disk of the state directory.")
_RESERVED = metrics.gauge("paddock_disk_reserve_bytes", "Bytes to keep free on that disk.")

_GIB = 1 << 30
_SHARE = 0.05
_LEAST_BYTES, _MOST_BYTES = 2 * _GIB, 8 * _GIB
_MOST_SHARE = 0.2
"""On a small disk, the reserve is no more than this share of it."""
_RELEASE = 1.1
"""The reserve counts as left when this many times the reserve is free, so that messages do not
alternate."""


class DiskStatus(Struct, frozen=True, kw_only=True):
    """Space of one file system, in bytes."""

    path: str
    total_bytes: int
    free_bytes: int
    reserve_bytes: int

    @property
    def is_low(self) -> bool:
        """Whether less than the reserve is free."""
        return self.free_bytes < self.reserve_bytes

    @property
    def has_room(self) -> bool:
        """Whether the reserve counts as left."""
        return self.free_bytes >= self.reserve_bytes * _RELEASE


def default_reserve(total_bytes: int) -> int:
    """Return 5 % of the disk: at least 2 and at most 8 GiB, and never more than a fifth of it."""
    wanted = min(max(int(total_bytes * _SHARE), _LEAST_BYTES), _MOST_BYTES)
    return min(wanted, int(total_bytes * _MOST_SHARE))


class DiskReserve:
    """The reserve of the file system of one directory."""

    def __init__(self, directory: Path, reserve_bytes: int | None = None) -> None:
        self._directory = directory
        self._reserve = reserve_bytes
        self._was_low = False

    def status(self) -> DiskStatus:
        """Return the space of the file system now."""
        stat = os.statvfs(self._directory)
        total = stat.f_blocks * stat.f_frsize
        reserve = default_reserve(total) if self._reserve is None else self._reserve
        return DiskStatus(
            path=str(self._directory),
            total_bytes=total,
            free_bytes=stat.f_bavail * stat.f_frsize,
            reserve_bytes=reserve,
        )

    def ensure_room(self, doing: str, needed_bytes: int = 0) -> None:
        """Raise `DiskFullError` if less than the reserve would be left."""
        disk = self.status()
        if disk.free_bytes - needed_bytes >= disk.reserve_bytes:
            return
        needs = f", and this needs {shown_bytes(needed_bytes)}" if needed_bytes else ""
        raise DiskFullError(
            f"cannot {doing}: the disk of {disk.path} has {shown_bytes(disk.free_bytes)} free, of "
            f"which {shown_bytes(disk.reserve_bytes)} are reserved{needs}",
            hint="delete sandboxes, snapshots or images, enlarge the disk, or lower the setting "
            "disk_reserve_bytes",
        )

    def writable_bytes(self, pending_bytes: int = 0) -> int:
        """Return what running sandboxes may still write: half of the reserve stays.

        `pending_bytes` are to be written already, and count as free.
        """
        disk = self.status()
        return max(0, disk.free_bytes - pending_bytes - disk.reserve_bytes // 2)

    def report(self) -> DiskStatus:
        """Log when the reserve is reached and when it is left; return the status."""
        disk = self.status()
        if disk.is_low and not self._was_low:
            self._was_low = True
            log.warning("disk reserve is reached: new work is refused", extra=_facts(disk))
        elif self._was_low and disk.has_room:
            self._was_low = False
            log.info("disk has space again", extra=_facts(disk))
        return disk


def export_metrics(reserve: DiskReserve) -> None:
    """Export what is free and reserved, measured at each scrape."""
    _FREE.set_function(lambda: reserve.status().free_bytes)
    _RESERVED.set_function(lambda: reserve.status().reserve_bytes)


def _facts(disk: DiskStatus) -> dict[str, object]:
    return fields(
        path=disk.path,
        free=shown_bytes(disk.free_bytes),
        reserve=shown_bytes(disk.reserve_bytes),
    )
