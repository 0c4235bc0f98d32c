"""Storage: the files that sandboxes write, and stored copies of them.

    storage = open_storage(state_dir / "storage")
    storage.sweep()                                   # after a crash: removes what was half made
    box = storage.create(uid, limit_bytes=10 << 30)   # box.path holds upper/ and work/
    storage.snapshot(uid, checkpoint_id)              # at once on btrfs; freeze the sandbox first
    box = storage.clone(checkpoint_id, other_uid)
    storage.delete(uid)                               # out of sight at once, freed by a thread

Calls take a millisecond or so on btrfs and may take long on plain directories: from asyncio use a
thread. They are safe to call from several threads as long as each uid has one caller at a time.

Owners on disk are those seen inside (root is 0): mount `box.path` idmapped (see `checkpoint`).
A limit counts data and metadata, so that empty files are bounded too; what a clone shares with its
checkpoint counts as used. Data that a checkpoint keeps alive stays charged to the sandbox that
wrote it.

`opening` chooses the backend, `pool` keeps a btrfs image, `btrfs` and `plain` keep trees.
"""

from paddock.runtime.local.storage.backend import Abilities, Space
from paddock.runtime.local.storage.opening import can_make_pool, open_storage
from paddock.runtime.local.storage.storage import Box, Storage

__all__ = ["Abilities", "Box", "Space", "Storage", "can_make_pool", "open_storage"]
