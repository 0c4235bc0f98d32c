"""A directory prepared for one restore: the new root, bind mounts, and images with another range.

Everything is attached below a directory of the workplace's tmpfs, in a copy of its mount namespace
that ends with the thread, so that nothing of it is ever seen by the host or left behind.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from paddock.runtime.local.checkpoint import manifest
from paddock.runtime.local.checkpoint.manifest import StoredMemory
from paddock.runtime.local.checkpoint.mounts import RUN
from paddock.runtime.local.kernel import syscalls

LOG = "restore.log"


class Ingredients(Struct, frozen=True, kw_only=True):
    """Detached mounts, opened where their sources are visible."""

    images: int
    root: int
    binds: Mapping[str, int]
    """By mount point inside."""


class Place:
    """The directory, while it is there. Use it inside `Workplace.run`."""

    def __init__(self, ingredients: Ingredients, memory: StoredMemory, id_base: int) -> None:
        self._ingredients = ingredients
        self._memory = memory
        self._id_base = id_base
        self._cleanup = contextlib.ExitStack()
        self._path = Path()
        self.externals: list[tuple[str, str]] = []
        """CRIU's keys of external mounts, and where they are now."""
        self.images_fd = -1
        self.work_fd = -1

    def __enter__(self) -> "Place":
        with contextlib.ExitStack() as cleanup:
            self._path = Path(tempfile.mkdtemp(prefix="restore-", dir=RUN))
            cleanup.callback(shutil.rmtree, self._path, ignore_errors=True)
            # Bind mounts are looked up by restored processes, which are not root outside.
            self._path.chmod(0o711)
            self._attach(cleanup, "root", self._ingredients.root)
            images = self._attach(cleanup, "images", self._ingredients.images)
            self._change_range(cleanup, images)
            self.externals = list(self._memory.devices.items())
            for number, (point, key) in enumerate(self._memory.externals.items()):
                path = self._attach(cleanup, f"bind-{number}", self._ingredients.binds[point])
                self.externals.append((key, str(path)))
            # Opened last and by path, so that what was mounted over is what is seen.
            self.images_fd = _open(cleanup, images)
            self.work_fd = _open(cleanup, self._path)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def root(self) -> str:
        """Where the new root is attached."""
        return str(self._path / "root")

    @property
    def log(self) -> Path:
        """What CRIU wrote."""
        return self._path / LOG

    def _attach(self, cleanup: contextlib.ExitStack, name: str, mount: int) -> Path:
        path = self._path / name
        path.mkdir(mode=0o700)
        syscalls.move_mount(mount, str(path))
        cleanup.callback(syscalls.umount, str(path), syscalls.MNT_DETACH)
        return path

    def _change_range(self, cleanup: contextlib.ExitStack, images: Path) -> None:
        """Lay a changed copy of the map over the stored one: no image is touched or copied."""
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
