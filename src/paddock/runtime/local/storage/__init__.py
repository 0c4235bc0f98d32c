"""Storage: the files that sandboxes write, and snapshots of them.

    storage = open_storage(state_dir / "storage")
    storage.sweep()                                   # after a crash: removes incomplete trees
    disk = storage.create(uid, limit_bytes=10 << 30)   # disk.path holds upper/ and work/
    storage.snapshot(uid, checkpoint_id)              # instant on btrfs; freeze the sandbox first
    disk = storage.clone(checkpoint_id, other_uid)
    storage.delete(uid)                               # renamed at once, freed by a thread

Calls take about a millisecond on btrfs and may take long on plain directories: use a thread from
asyncio. They are thread-safe as long as each uid has one caller at a time.

Owners on disk are those seen inside (root is 0): mount `disk.path` idmapped (see `checkpoint`).
A limit applies to data and metadata, so that empty files count too. Data that a clone shares with
its checkpoint counts as used. Data that a checkpoint keeps alive stays charged to the sandbox that
wrote it.

`select_backend` chooses the backend, `btrfs_image` manages a btrfs image, `btrfs` and
`plain` are the backends.
"""

from paddock.runtime.local.storage.backend import Space, StorageCapabilities
from paddock.runtime.local.storage.reserve import DiskReserve, DiskStatus
from paddock.runtime.local.storage.select_backend import (
    btrfs_image_unavailable_reason,
    open_storage,
)
from paddock.runtime.local.storage.storage import SandboxDisk, Storage

__all__ = [
    "DiskReserve",
    "DiskStatus",
    "SandboxDisk",
    "Space",
    "Storage",
    "StorageCapabilities",
    "btrfs_image_unavailable_reason",
    "open_storage",
]
