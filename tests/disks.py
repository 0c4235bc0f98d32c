"""Small disks for tests about full ones."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of that size (as `mount` writes it) at a new directory."""
    place.mkdir(exist_ok=True)
    mount(place, size)
    try:
        yield place
    finally:
        unmount(place)


def mount(place: Path, size: str) -> None:
    """Put a file system of that size over a directory."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    subprocess.run(command, check=True)


def unmount(place: Path) -> None:
    """Take it away at once.

    Lazily: a sandbox that starts beside the test copies every mount of the machine for a moment,
    and while it holds its copy of an image that lies on this disk, a plain `umount` is refused.
    """
    subprocess.run(["umount", "--lazy", str(place)], check=True)
