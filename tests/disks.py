"""Small disks for tests of full disks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size (in the syntax of `mount`) at a new directory."""
    path.mkdir(exist_ok=True)
    mount(path, size)
    try:
        yield path
    finally:
        unmount(path)


def mount(path: Path, size: str) -> None:
    """Mount a file system of this size on a directory."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    subprocess.run(command, check=True)


def unmount(path: Path) -> None:
    """Unmount it lazily.

    A sandbox that starts beside the test copies all mounts of the machine for a moment. While it
    holds a copy of this mount, a plain `umount` fails.
    """
    subprocess.run(["umount", "--lazy", str(path)], check=True)
