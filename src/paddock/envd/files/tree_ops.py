"""Removing trees and moving across overlay layers.

Blocking. A directory of a lower overlay layer cannot be renamed (EXDEV), so moving falls back
to copy and remove, as mv does.
"""

import errno
import os
import shutil
import stat


def remove(path: str) -> None:
    """Remove a file or tree; a missing path is no error."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def move(source: str, destination: str) -> None:
    """Rename; replace an existing file."""
    try:
        os.rename(source, destination)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(source, destination)
        remove(source)


def _copy(source: str, destination: str) -> None:
    info = os.lstat(source)
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(destination, 0o700)
        with os.scandir(source) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            _copy(os.path.join(source, name), os.path.join(destination, name))
    elif stat.S_ISREG(info.st_mode):
        shutil.copyfile(source, destination, follow_symlinks=False)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), destination)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(destination)
    else:
        raise OSError(errno.EXDEV, "sockets and devices cannot be moved across filesystems", source)
    os.chown(destination, info.st_uid, info.st_gid, follow_symlinks=False)
    shutil.copystat(source, destination, follow_symlinks=False)
