"""Files that only their owner can read: created with mode 0600, complete or absent after a crash.

The content is written to a temporary file beside the target, which then takes its name. A reader
never finds half of a file, and no other user can read it at any time.
"""

import os
import secrets
from pathlib import Path

MODE = 0o600


def replace(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, in place of the one that may exist."""
    temporary = _written(path, content)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
    sync_directory(path.parent)


def create(path: Path, content: bytes) -> bool:
    """Write a file that only its owner can read; return False if one exists, which then stays."""
    temporary = _written(path, content)
    try:
        # A link fails if another process was faster; a rename would replace its file.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync_directory(path.parent)
    return True


def _written(path: Path, content: bytes) -> Path:
    """Write a temporary file beside the target, durably, and return its path."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink()
        raise
    return temporary


def sync_directory(path: Path) -> None:
    """Make the directory entry durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
