"""Choose the storage backend of this machine.

`auto` uses a state directory on btrfs as it is, else creates a btrfs image if `mkfs.btrfs` and loop
devices are available, else uses plain directories and logs the consequences. The choice is kept:
existing data in the state directory decides.
"""

import logging
import os
import shutil
from pathlib import Path

from paddock.kit.errors import InvalidError, PaddockError, UnsupportedError
from paddock.kit.logs import fields
from paddock.runtime.local.storage import btrfs_ioctl
from paddock.runtime.local.storage.backend import Backend
from paddock.runtime.local.storage.btrfs import BtrfsBackend
from paddock.runtime.local.storage.btrfs_image import BtrfsImage
from paddock.runtime.local.storage.plain import PlainBackend
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.runtime.local.storage.storage import Storage

log = logging.getLogger(__name__)

IMAGE = "pool.btrfs"
MOUNT = "pool"
AUTO, BTRFS, PLAIN = "auto", "btrfs", "plain"


def open_storage(
    root: Path,
    *,
    backend: str = AUTO,
    image_bytes: int | None = None,
    reserve: DiskReserve | None = None,
) -> Storage:
    """Open the storage below a directory; create it if missing."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    reserve = reserve or DiskReserve(root)
    storage = Storage(root, _choose(root, backend, image_bytes, reserve), reserve)
    storage.keep_reserve()
    return storage


def _choose(root: Path, wanted: str, image_bytes: int | None, reserve: DiskReserve) -> Backend:
    if wanted not in (AUTO, BTRFS, PLAIN):
        raise InvalidError(f"{wanted!r} is not a storage backend", hint="use auto, btrfs or plain")
    mount_point = root / MOUNT
    mount_point.mkdir(exist_ok=True, mode=0o700)
    image = root / IMAGE
    kept_plain = (mount_point / "boxes").is_dir() and not image.exists()
    if not image.exists() and btrfs_ioctl.is_btrfs(root) and wanted != PLAIN:
        return BtrfsBackend(mount_point)
    if wanted == PLAIN or (wanted == AUTO and kept_plain):
        return PlainBackend(mount_point)
    try:
        _require_root()
        btrfs = BtrfsImage(image, mount_point, reserve)
        btrfs.open(image_bytes)
    except PaddockError as error:
        if wanted == BTRFS or image.exists():
            raise
        log.warning(
            "btrfs is not available: copies are slow and disk use may be unlimited",
            extra=fields(reason=error.message, hint=error.hint),
        )
        return PlainBackend(mount_point)
    return BtrfsBackend(mount_point, image=btrfs)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise UnsupportedError("mounting a btrfs image needs root")
    if not os.path.exists("/dev/loop-control"):
        raise UnsupportedError(
            "this machine has no loop devices", hint="load the kernel module loop"
        )


def btrfs_image_unavailable_reason() -> str | None:
    """Return why no btrfs image can be created here, or `None`."""
    try:
        _require_root()
    except UnsupportedError as error:
        return error.message
    if not shutil.which("mkfs.btrfs"):
        return "mkfs.btrfs is not installed"
    if "btrfs" not in Path("/proc/filesystems").read_text().split():
        return "the kernel has no btrfs"
    return None
