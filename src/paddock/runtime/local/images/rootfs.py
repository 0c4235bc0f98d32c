"""Root file systems that become layers: directories and plain tars."""

import contextlib
import errno
import os
import subprocess
import tarfile
from pathlib import Path
from typing import IO

from paddock.kit.errors import InvalidError, NotFoundError
from paddock.runtime.local.images.archive import TarBlobs
from paddock.runtime.local.images.limits import ImportBudget
from paddock.runtime.local.storage.backend import storage_error
from paddock.wire.bounded_tar import BoundedTarInfo


class SingleBlob:
    """One open file as a set of blobs."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def read(self, name: str) -> bytes:
        raise NotFoundError(f"there is no {name!r}")

    def open(self, name: str) -> IO[bytes]:
        return self._raw

    def has(self, name: str) -> bool:
        return False


def is_rootfs_tar(source: Path, budget: ImportBudget) -> bool:
    """Whether a tar has the top directories of a root file system."""
    with tarfile.open(source, "r:*", tarinfo=BoundedTarInfo) as archive:
        names = TarBlobs(archive, budget).names
    return any(name.split("/")[0] in ("bin", "usr") for name in names)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory with owners, modes and links; blocks are shared if the disk can."""
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "-T", str(source), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        if "No space left" in done.stderr:
            raise storage_error(OSError(errno.ENOSPC, done.stderr), f"cannot import {source}")
        raise InvalidError(f"{source} could not be copied: {done.stderr.strip()[-500:]}")


def disk_use(path: Path) -> int:
    """Return the bytes that the files of a directory take on the disk."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total
