"""Facade of the package: the files of sandboxes and checkpoints.

    <root>/pool/boxes/<uid>/{upper,work}       files written by a sandbox
    <root>/pool/checkpoints/<id>/{upper,work}  a snapshot of them
    <root>/pool/trash/                         trees being deleted
    <root>/memory/{boxes,checkpoints}/<name>/  CRIU images of a hibernated sandbox or a checkpoint
    <root>/records/{boxes,checkpoints}/<name>.json

Operations are idempotent. A record is written when its tree is complete; a tree without a record is
incomplete and is removed by `sweep`, which the node calls at start.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError, NotFoundError
from paddock.runtime.local.storage import btrfs_ioctl
from paddock.runtime.local.storage.backend import Backend, Space, StorageCapabilities
from paddock.runtime.local.storage.btrfs import BtrfsBackend
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.runtime.local.storage.shared_disk import SharedDisk, Tree
from paddock.runtime.local.storage.trash import Trash

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SMALLEST_BYTES = 1 << 20
SANDBOXES = "boxes"  # the name on disk, kept for existing state directories
CHECKPOINTS = "checkpoints"
_KINDS = (SANDBOXES, CHECKPOINTS)


class SandboxDisk(Struct, frozen=True, kw_only=True):
    """The writable files of one sandbox. Owners on disk are those seen inside (root is 0)."""

    uid: str
    path: Path
    """Mount this idmapped, then use `upper` and `work` below the mount point."""
    limit_bytes: int = 0

    @property
    def upper(self) -> Path:
        """The overlay's upper directory."""
        return self.path / "upper"

    @property
    def work(self) -> Path:
        """The overlay's work directory."""
        return self.path / "work"


class _Record(Struct, frozen=True, kw_only=True):
    limit_bytes: int = 0
    inherited_bytes: int = 0
    """Bytes shared with the source checkpoint: they count as used, but another tree is charged."""
    base: str = ""
    """The last checkpoint with which the tree shares files: its source, or one taken of it."""
    shared_bytes: int = 0
    """Bytes of files that are shared with the base."""


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(_Record)


class Storage:
    """Disks and checkpoints on one backend."""

    def __init__(self, root: Path, backend: Backend, reserve: DiskReserve | None = None) -> None:
        self._root = root
        self._backend = backend
        self.reserve = reserve or DiskReserve(root)
        """The space to keep free on the disk."""
        self._shared_disk = SharedDisk(backend, self.reserve)
        for kind in _KINDS:
            for parent in (backend.root, root / "memory", root / "records"):
                (parent / kind).mkdir(parents=True, exist_ok=True, mode=0o700)
        for directory in (root, backend.root):
            directory.chmod(0o700)
        self._trash = Trash(backend.root / "trash", root / "memory" / "trash", backend)

    @property
    def backend_name(self) -> str:
        """`btrfs` or `plain`."""
        return self._backend.name

    @property
    def trees(self) -> Path:
        """The directory that contains the files of all sandboxes."""
        return self._backend.root

    @property
    def capabilities(self) -> StorageCapabilities:
        return self._backend.capabilities

    def create(self, uid: str, *, limit_bytes: int = 0) -> SandboxDisk:
        """Create an empty disk, or return the existing one."""
        if (there := self.find(uid)) is not None:
            return there
        self.reserve.ensure_room(f"create the disk of sandbox {uid}")
        path = self._tree(SANDBOXES, uid)
        self._discard(path)
        self._backend.create_tree(path)
        return self._finish(uid, path, _Record(limit_bytes=limit_bytes))

    def clone(self, checkpoint_id: str, uid: str, *, limit_bytes: int = 0) -> SandboxDisk:
        """Create a disk with the files of a checkpoint, or return the existing one."""
        if (there := self.find(uid)) is not None:
            return there
        source_record = self._read(CHECKPOINTS, checkpoint_id)
        source = self._tree(CHECKPOINTS, checkpoint_id)
        if source_record is None:
            raise NotFoundError(f"there is no checkpoint {checkpoint_id}")
        self.reserve.ensure_room(
            f"create the disk of sandbox {uid} from a checkpoint",
            self._copied_bytes(source_record.inherited_bytes),
        )
        path = self._tree(SANDBOXES, uid)
        self._discard(path)
        self._backend.copy_tree(source, path)
        inherited = source_record.inherited_bytes if self._shares_blocks() else 0
        record = _Record(
            limit_bytes=limit_bytes,
            inherited_bytes=inherited,
            base=checkpoint_id,
            shared_bytes=inherited,
        )
        return self._finish(uid, path, record)

    def snapshot(self, uid: str, checkpoint_id: str) -> None:
        """Snapshot the files of a disk; the sandbox must not write during the call."""
        if self._read(CHECKPOINTS, checkpoint_id) is not None:
            return
        record = self._require(uid)
        source, target = self._tree(SANDBOXES, uid), self._tree(CHECKPOINTS, checkpoint_id)
        used = self._backend.used_bytes(source) + record.inherited_bytes
        self.reserve.ensure_room(f"store the files of sandbox {uid}", self._copied_bytes(used))
        self._discard(target)
        self._backend.copy_tree(source, target)
        kept = _Record(
            inherited_bytes=used,
            base=record.base,
            shared_bytes=min(record.shared_bytes, used),
        )
        self._write(CHECKPOINTS, checkpoint_id, kept)
        if self._backend.charges_writers:
            shared = msgspec.structs.replace(record, base=checkpoint_id, shared_bytes=used)
            self._write(SANDBOXES, uid, shared)

    def flush(self, uid: str) -> None:
        """Write out dirty data, to keep a following freeze short."""
        self._backend.flush(self._tree(SANDBOXES, uid))

    def find(self, uid: str) -> SandboxDisk | None:
        """Return a complete disk, or `None`."""
        record = self._read(SANDBOXES, uid)
        path = self._tree(SANDBOXES, uid)
        if record is None or not path.is_dir():
            return None
        return SandboxDisk(uid=uid, path=path, limit_bytes=record.limit_bytes)

    def has_checkpoint(self, checkpoint_id: str) -> bool:
        """Whether the files of a checkpoint exist."""
        there = self._read(CHECKPOINTS, checkpoint_id) is not None
        return there and self._tree(CHECKPOINTS, checkpoint_id).is_dir()

    def limit(self, uid: str, limit_bytes: int) -> None:
        """Change the limit of a disk."""
        record = msgspec.structs.replace(self._require(uid), limit_bytes=limit_bytes)
        self._backend.limit_tree(self._tree(SANDBOXES, uid), _writable_bytes(record))
        self._write(SANDBOXES, uid, record)
        if self._shared_disk.is_tight:
            self.keep_reserve()

    def usage_bytes(self, uid: str) -> int:
        """Return the usage of a disk, including data shared with its source."""
        record = self._require(uid)
        return self._backend.used_bytes(self._tree(SANDBOXES, uid)) + record.inherited_bytes

    def open_usage_counter(self, uid: str) -> int | None:
        """Open the usage counter of a disk, or return `None` (see `Backend.open_usage_counter`)."""
        return self._backend.open_usage_counter(self._tree(SANDBOXES, uid))

    def inherited_bytes(self, uid: str) -> int:
        """Return the bytes shared with the source, which the usage counter does not include."""
        return self._require(uid).inherited_bytes

    def checkpoint_bytes(self, checkpoint_id: str) -> int:
        """Return the size of a checkpoint: files and memory."""
        record = self._read(CHECKPOINTS, checkpoint_id)
        if record is None:
            raise NotFoundError(f"there is no checkpoint {checkpoint_id}")
        return record.inherited_bytes + _size(self.checkpoint_memory(checkpoint_id))

    def checkpoint_shared(self, checkpoint_id: str) -> tuple[str, int]:
        """Return the checkpoint with which one shares files, and how many bytes."""
        record = self._read(CHECKPOINTS, checkpoint_id)
        if record is None or not self._backend.charges_writers:
            return "", 0
        return record.base, record.shared_bytes

    def sandbox_memory(self, uid: str) -> Path:
        """Return the directory for the memory of a hibernated disk; it may not exist."""
        return self._root / "memory" / SANDBOXES / _valid_name(uid)

    def checkpoint_memory(self, checkpoint_id: str) -> Path:
        """Return the directory for the memory of a checkpoint; it may not exist."""
        return self._root / "memory" / CHECKPOINTS / _valid_name(checkpoint_id)

    def copy_memory(self, uid: str, checkpoint_id: str) -> None:
        """Copy the memory of a hibernated disk to a checkpoint, by hard links.

        Its files are never written again.
        """
        target = self.checkpoint_memory(checkpoint_id)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.sandbox_memory(uid), target, copy_function=os.link)

    def delete(self, uid: str) -> None:
        """Delete a disk: rename it at once, free it in the background. Unknown uids are ignored."""
        self._forget(SANDBOXES, uid, self.sandbox_memory(uid))

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        """Delete a checkpoint and its memory. Unknown ids are ignored."""
        self._forget(CHECKPOINTS, checkpoint_id, self.checkpoint_memory(checkpoint_id))

    def drop_memory(self, uid: str) -> None:
        """Delete the memory of a restored disk."""
        self._trash.discard_memory(self.sandbox_memory(uid))

    def disks(self) -> tuple[str, ...]:
        """Return the names of complete disks."""
        return self._names(SANDBOXES)

    def checkpoints(self) -> tuple[str, ...]:
        """List complete checkpoints."""
        return self._names(CHECKPOINTS)

    def space(self) -> Space:
        """Return the size of the file system."""
        return self._backend.space()

    def keep_reserve(self) -> str | None:
        """Report whether the reserve is reached, and let sandboxes write no more than there is.

        Return the name of a disk whose sandbox must end, since its writes cannot be bounded.
        """
        disk = self.reserve.report()
        self._backend.fit_to_disk()
        return self._shared_disk.keep(self._trees, disk)

    def _trees(self) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for name in self._names(SANDBOXES):
            if (record := self._read(SANDBOXES, name)) is not None:
                found[name] = Tree(self._tree(SANDBOXES, name), _writable_bytes(record))
        return found

    def stored_memory_bytes(self, uid: str) -> int:
        """Return the size of the memory of a hibernated disk."""
        return _size(self.sandbox_memory(uid))

    def sweep(self) -> tuple[str, ...]:
        """Remove what a crash left incomplete; return the names."""
        found: list[str] = []
        for kind in _KINDS:
            known = set(self._names(kind))
            for name in os.listdir(self._backend.root / kind):
                if name not in known:
                    self._discard(self._backend.root / kind / name)
                    found.append(f"{kind}/{name}")
            for name in os.listdir(self._root / "memory" / kind):
                if name not in known:
                    self._trash.discard_memory(self._root / "memory" / kind / name)
                    found.append(f"memory/{kind}/{name}")
            for entry in os.listdir(self._root / "records" / kind):
                if entry.removesuffix(".json") not in known:
                    os.unlink(self._root / "records" / kind / entry)
        self._trash.resume()
        if isinstance(self._backend, BtrfsBackend):
            living = (
                btrfs_ioctl.subvolume_id(self._tree(kind, name))
                for kind in _KINDS
                for name in self._names(kind)
            )
            self._backend.drop_stale_groups(frozenset(living))
        return tuple(found)

    def wait_deleted(self) -> None:
        """Wait until all deletions are finished."""
        self._trash.wait_deleted()

    def close(self, *, detach: bool = False) -> None:
        """Finish deletions. The image stays mounted for running sandboxes, unless `detach`."""
        self._trash.close()
        if detach:
            self._backend.detach()

    def _finish(self, uid: str, path: Path, record: _Record) -> SandboxDisk:
        for name in ("upper", "work"):
            (path / name).mkdir(mode=0o755, exist_ok=True)
        (path / "upper").chmod(0o755)
        self._backend.limit_tree(path, _writable_bytes(record))
        self._write(SANDBOXES, uid, record)
        return SandboxDisk(uid=uid, path=path, limit_bytes=record.limit_bytes)

    def _forget(self, kind: str, name: str, memory: Path) -> None:
        # The record is removed first: after a crash, `sweep` removes a tree without record.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._record(kind, name))
        self._discard(self._tree(kind, name))
        self._trash.discard_memory(memory)

    def _discard(self, path: Path) -> None:
        if path.exists():
            self._trash.discard_tree(path)

    def _shares_blocks(self) -> bool:
        return self._backend.capabilities.instant_snapshots

    def _copied_bytes(self, used: int) -> int:
        """Return the space that a copy of a tree takes at once."""
        return 0 if self._shares_blocks() else used

    def _require(self, uid: str) -> _Record:
        record = self._read(SANDBOXES, uid)
        if record is None:
            raise NotFoundError(f"sandbox {uid} has no files")
        return record

    def _names(self, kind: str) -> tuple[str, ...]:
        trees = set(os.listdir(self._backend.root / kind))
        records = (
            entry.removesuffix(".json") for entry in os.listdir(self._root / "records" / kind)
        )
        return tuple(sorted(trees.intersection(records)))

    def _tree(self, kind: str, name: str) -> Path:
        return self._backend.root / kind / _valid_name(name)

    def _record(self, kind: str, name: str) -> Path:
        return self._root / "records" / kind / f"{_valid_name(name)}.json"

    def _read(self, kind: str, name: str) -> _Record | None:
        try:
            return _decoder.decode(self._record(kind, name).read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            # An unreadable record was not written completely: the tree is incomplete.
            return None

    def _write(self, kind: str, name: str, record: _Record) -> None:
        path = self._record(kind, name)
        fresh = path.with_suffix(".tmp")
        fresh.write_bytes(msgspec.json.encode(record))
        fresh.rename(path)


def _writable_bytes(record: _Record) -> int:
    """Return what a tree may write itself: the limit less the inherited bytes."""
    if record.limit_bytes <= 0:
        return 0
    return max(record.limit_bytes - record.inherited_bytes, _SMALLEST_BYTES)


def _valid_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidError(f"{name!r} is not a valid name of a sandbox or a checkpoint")
    return name


def _size(directory: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            stat = entry.stat(follow_symlinks=False)
            # Holes of sparse images take no space.
            total += min(stat.st_size, stat.st_blocks * 512)
    return total
