"""Reads files of an image in its layers, as an overlay of them would show these.

Nothing is mounted, so it needs no rights. Symlinks are resolved inside the tree: an image cannot
refer to files of the machine.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

_MAX_BYTES = 1 << 20
_MAX_LINKS = 40
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


class TreeEntry(Struct, frozen=True):
    """An entry of the merged tree."""

    path: str
    """Absolute, inside the image, free of symlinks except a dangling last one."""
    sources: tuple[Path, ...]
    """The layers' files behind it, highest first; several for a directory."""
    info: os.stat_result

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)


class MergedTree:
    """The layers of an image, lowest first."""

    def __init__(self, layers: Sequence[Path]) -> None:
        roots = tuple(reversed(layers))
        self._root = TreeEntry("/", roots, os.stat(roots[0]))

    def find(self, path: str) -> TreeEntry | None:
        """Return the entry that a path leads to, or None."""
        pending = [part for part in reversed(path.split("/")) if part not in ("", ".")]
        trail = [self._root]
        links = 0
        while pending:
            part = pending.pop()
            if not trail[-1].is_directory:
                return None
            if part == "..":
                trail = trail[:-1] or [self._root]
                continue
            entry = _child(trail[-1], part)
            if entry is None:
                return None
            if stat.S_ISLNK(entry.info.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    return None
                target = os.readlink(entry.sources[0])
                if target.startswith("/"):
                    trail = [self._root]
                pending += [step for step in reversed(target.split("/")) if step not in ("", ".")]
            else:
                trail.append(entry)
        return trail[-1]

    def read(self, path: str) -> str | None:
        """Return the text of a regular file; None if there is none, or it cannot be read.

        Without root, a file of the image may be unreadable: /etc/shadow of Fedora has mode 0.
        """
        entry = self.find(path)
        if entry is None or not stat.S_ISREG(entry.info.st_mode) or entry.info.st_size > _MAX_BYTES:
            return None
        try:
            return entry.sources[0].read_bytes().decode("utf-8", "surrogateescape")
        except PermissionError:
            return None

    def is_program(self, path: str) -> bool:
        """Whether a path leads to an executable file."""
        entry = self.find(path)
        return (
            entry is not None
            and stat.S_ISREG(entry.info.st_mode)
            and bool(entry.info.st_mode & 0o111)
        )

    def location(self, path: str) -> str | None:
        """Return where a new entry of that path is: its directory resolved as far as it exists.

        None if a file is in the way.
        """
        parts = [part for part in path.split("/") if part]
        place, missing = self._root, parts
        for count in range(len(parts) - 1, 0, -1):
            found = self.find("/".join(parts[:count]))
            if found is not None:
                place, missing = found, parts[count:]
                break
        if not place.is_directory:
            return None
        return "/".join([place.path.rstrip("/"), *missing])


def _child(directory: TreeEntry, name: str) -> TreeEntry | None:
    """Look a name up in the layers, down to the first that hides those below."""
    found: list[tuple[Path, os.stat_result]] = []
    for source in directory.sources:
        path = source / name
        try:
            info = os.lstat(path)
        except OSError:  # also a name that is too long, from a link
            continue
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            break  # a whiteout
        if found and not stat.S_ISDIR(info.st_mode):
            break
        found.append((path, info))
        if not stat.S_ISDIR(info.st_mode) or is_opaque(path):
            break
    if not found:
        return None
    whole = f"{directory.path.rstrip('/')}/{name}"
    return TreeEntry(whole, tuple(path for path, _ in found), found[0][1])


def is_opaque(path: Path) -> bool:
    """Whether a directory of a layer hides what lower layers have below it."""
    return any(name in _OPAQUE for name in os.listxattr(path))
