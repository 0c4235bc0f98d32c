"""Resolving client paths, and opening files safely.

envd acts as root of the sandbox, and its root directory is the sandbox's: links and renames that
race with a call lead to files of the same sandbox. FIFOs and devices are the remaining danger: they
must not block envd, so everything is opened non-blocking and checked.
"""

import os
import posixpath
import stat

_SAFE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class BadPathError(ValueError):
    """The path is invalid."""


class NotRegularError(Exception):
    """The path exists but is not a regular file."""

    def __init__(self, path: str, mode: int) -> None:
        self.is_directory = stat.S_ISDIR(mode)
        kind = "a directory" if self.is_directory else "not a regular file"
        super().__init__(f"path {path!r} is {kind}")


class ParentError(Exception):
    """A parent of the path exists and is not a directory."""


def resolve(path: str, *, home: str, default: str | None = None) -> str:
    """Return an absolute path: empty is the default, `~` and relative paths are under home."""
    if "\0" in path:
        raise BadPathError("a path cannot contain NUL bytes")
    if not path:
        path = default or home
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    elif path.startswith("~"):
        raise BadPathError(f"cannot expand {path!r}: only the user's own ~ is known")
    absolute = posixpath.normpath(posixpath.join(home, path))
    return "/" + absolute.lstrip("/")


def open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file without blocking on a FIFO or device."""
    try:
        fd = os.open(path, flags | _SAFE, mode)
    except OSError as error:
        if error.errno in (6, 21):  # ENXIO: a FIFO without reader or a socket; EISDIR
            raise NotRegularError(path, _mode(path)) from error
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise NotRegularError(path, info.st_mode)
    return fd


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def make_parents(path: str, *, uid: int, gid: int) -> None:
    """Create the missing parent directories of a path, owned by the user."""
    make_directories(posixpath.dirname(path), uid=uid, gid=gid)


def make_directories(path: str, *, uid: int, gid: int) -> None:
    """Create a directory and its parents; only new ones get the owner."""
    missing: list[str] = []
    probe = path
    while probe != "/" and not os.path.isdir(probe):
        missing.append(probe)
        probe = posixpath.dirname(probe)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o755)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise ParentError(f"{directory!r} exists and is not a directory") from None
            continue
        os.chown(directory, uid, gid, follow_symlinks=False)
