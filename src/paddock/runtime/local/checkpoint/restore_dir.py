"""The directory of one restore: the new root, bind mounts, and images with the new id range.

Everything is mounted below a directory on the tmpfs of CRIU's mount namespace, in a copy of that
namespace that ends with the thread. So the host never sees it, and nothing is left behind.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from paddock.runtime.local.checkpoint import manifest
from paddock.runtime.local.checkpoint.manifest import StoredMemory
from paddock.runtime.local.checkpoint.mounts import RUN
from paddock.runtime.local.kernel import syscalls

LOG = "restore.log"


class RestoreSources(Struct, frozen=True, kw_only=True):
    """Detached mounts to attach, opened in the host's mount namespace."""

    images: int
    root: int
    binds: Mapping[str, int]
    """By mount point inside."""


class RestoreDir:
    """The directory, as a context manager. Use it inside `CriuMountNamespace.run`."""

    def __init__(self, sources: RestoreSources, memory: StoredMemory, id_base: int) -> None:
        self._sources = sources
        self._memory = memory
        self._id_base = id_base
        self._cleanup = contextlib.ExitStack()
        self._path = Path()
        self.externals: list[tuple[str, str]] = []
        """CRIU's keys of external mounts, and their paths."""
        self.images_fd = -1
        self.work_fd = -1

    def __enter__(self) -> "RestoreDir":
        with contextlib.ExitStack() as cleanup:
            self._path = Path(tempfile.mkdtemp(prefix="restore-", dir=RUN))
            cleanup.callback(shutil.rmtree, self._path, ignore_errors=True)
            # Restored processes, which are not root on the host, look up bind mounts.
            self._path.chmod(0o711)
            self._attach(cleanup, "root", self._sources.root)
            images = self._attach(cleanup, "images", self._sources.images)
            self._remap_ids(cleanup, images)
            self.externals = list(self._memory.devices.items())
            for number, (point, key) in enumerate(self._memory.externals.items()):
                path = self._attach(cleanup, f"bind-{number}", self._sources.binds[point])
                self.externals.append((key, str(path)))
            # Opened last and by path, so that the mounts on top are visible.
            self.images_fd = _open(cleanup, images)
            self.work_fd = _open(cleanup, self._path)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def root(self) -> str:
        """Path of the new root."""
        return str(self._path / "root")

    @property
    def log(self) -> Path:
        """Path of CRIU's log."""
        return self._path / LOG

    def _attach(self, cleanup: contextlib.ExitStack, name: str, mount: int) -> Path:
        path = self._path / name
        if stat.S_ISDIR(os.fstat(mount).st_mode):
            path.mkdir(mode=0o700)
        else:
            path.touch(mode=0o600)
        syscalls.move_mount(mount, str(path))
        cleanup.callback(syscalls.umount, str(path), syscalls.MNT_DETACH)
        return path

    def _remap_ids(self, cleanup: contextlib.ExitStack, images: Path) -> None:
        """Mount an edited copy over the stored `userns` image; no image is changed."""
        if self._memory.id_base == self._id_base:
            return
        for name in self._memory.files:
            if not name.startswith("userns-"):
                continue
            stored, changed = images / name, self._path / name
            image = stored.read_bytes()
            changed.write_bytes(manifest.with_id_range(image, self._id_base, self._memory.id_count))
            syscalls.mount(str(changed), str(stored), None, syscalls.MS_BIND)
            cleanup.callback(syscalls.umount, str(stored), syscalls.MNT_DETACH)


def _open(cleanup: contextlib.ExitStack, path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    cleanup.callback(os.close, fd)
    return fd
