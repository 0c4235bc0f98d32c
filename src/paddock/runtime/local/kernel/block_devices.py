"""The disks below directories, as the I/O controllers of cgroups name them."""

import os
from pathlib import Path


def disks_of(*directories: Path) -> tuple[str, ...]:
    """Return the whole disks (`major:minor`) that hold directories.

    A loop device counts together with the disk that holds its file.
    """
    found: dict[str, None] = {}
    for directory in directories:
        path: Path | None = directory
        while path is not None:
            disk = _disk_of(path)
            if disk is None or disk in found:
                break
            found[disk] = None
            path = _backing_file(disk)
    return tuple(found)


def _disk_of(path: Path) -> str | None:
    """Return the whole disk of a path; `None` for a file system without a disk."""
    device = os.stat(path).st_dev
    if os.major(device) == 0:  # btrfs has device numbers of its own
        source = _source_of(path)
        if source is None:
            return None
        device = os.stat(source).st_rdev
    own = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not own.exists():
        return None
    if (own / "partition").exists():
        own = own.resolve().parent
    return (own / "dev").read_text().strip()


def _source_of(path: Path) -> str | None:
    """Return the device that is mounted where a path is."""
    resolved = path.resolve()
    best, source = "", None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if resolved.is_relative_to(point) and len(point) >= len(best):
            best, source = point, after.split()[1]
    return source if source is not None and os.path.exists(source) else None


def _backing_file(disk: str) -> Path | None:
    """Return the directory of the file behind a loop device."""
    try:
        text = Path(f"/sys/dev/block/{disk}/loop/backing_file").read_text().strip()
    except OSError:
        return None
    parent = Path(text).parent
    return parent if parent.exists() else None
