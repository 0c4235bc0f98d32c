"""Directories in which images are built. Each is removed at the end of its build.

What a killed build has left is removed at the next start: if no build has the lock, and after some
time, because programs of a killed build may run on for a while.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from paddock.runtime.local.kernel import syscalls

_PREFIX = ".building-"
_ABANDONED_SECONDS = 900.0
_MOUNTS = ("proc", "sys", "dev/pts", "dev/shm")
"""What debootstrap mounts in a tree, and leaves mounted if it is killed."""


@contextlib.contextmanager
def work_directory(cache: Path) -> Generator[Path]:
    """Yield a private directory below the cache, which is removed at the end."""
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache, fcntl.LOCK_SH):
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=cache))
        try:
            yield work
        finally:
            _remove(work)


def remove_abandoned(cache: Path) -> tuple[Path, ...]:
    """Remove what killed builds have left; return the directories. Nothing during a build.

    Only root can, who has built.
    """
    if os.geteuid() != 0:
        return ()
    oldest = time.time() - _ABANDONED_SECONDS
    found = [path for path in cache.glob(f"{_PREFIX}*") if path.lstat().st_mtime < oldest]
    if not found:
        return ()
    with contextlib.suppress(BlockingIOError), _locked(cache, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for work in found:
            _remove(work)
        return tuple(found)
    return ()


@contextlib.contextmanager
def _locked(cache: Path, how: int) -> Generator[None]:
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _remove(work: Path) -> None:
    for tree in work.glob("*"):
        for name in _MOUNTS:
            if (tree / name).is_mount():
                syscalls.umount(str(tree / name), syscalls.MNT_DETACH)
    shutil.rmtree(work, ignore_errors=True)
