"""Reading entries of the file system: `EntryInfo`, listings, metadata xattrs.

Blocking. All input is controlled by the sandbox: names are arbitrary bytes, times are arbitrary
numbers, directories may have any size.
"""

import contextlib
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from paddock.envd.rpc.connect_frames import printable
from paddock.envd.rpc.messages import EntryInfo, FileType
from paddock.envd.users import Users

XATTR_PREFIX = "user.e2b."
MAX_ENTRIES = 200_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FARTHEST = 253_402_300_799
_BLOCK = 4096
_FLAGS = (
    (stat.S_ISDIR, "d"),
    (stat.S_ISLNK, "L"),
    (stat.S_ISBLK, "D"),
    (stat.S_ISFIFO, "p"),
    (stat.S_ISSOCK, "S"),
    (stat.S_ISCHR, "Dc"),
)


class TooManyEntriesError(Exception):
    """The listing has more than `MAX_ENTRIES` entries."""


def permissions(mode: int) -> str:
    """Format a mode as Go does: `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`, `dtrwxrwxrwx`."""
    kind = next((letters for is_kind, letters in _FLAGS if is_kind(mode)), "")
    special = "".join(
        letter
        for bit, letter in ((stat.S_ISUID, "u"), (stat.S_ISGID, "g"), (stat.S_ISVTX, "t"))
        if mode & bit
    )
    if kind == "Dc":
        kind, special = "D", special.replace("t", "") + "c" + ("t" if "t" in special else "")
    bits = "".join(
        letter if mode & (1 << (8 - place)) else "-" for place, letter in enumerate("rwxrwxrwx")
    )
    return (kind + special or "-") + bits


def describe(path: str, users: Users, *, shown_as: str | None = None) -> EntryInfo:
    """Return one entry; raise `FileNotFoundError` if there is none."""
    info = os.lstat(path)
    kind, mode, target = _kind(info.st_mode), info.st_mode, None
    if stat.S_ISLNK(info.st_mode):
        target = os.path.realpath(path)
        try:
            followed = os.stat(path)
        except OSError:
            kind = FileType.UNSPECIFIED
        else:
            kind, mode = _kind(followed.st_mode), followed.st_mode
    shown = shown_as or path
    return EntryInfo(
        name=printable(posixpath.basename(shown) or shown),
        type=kind,
        path=printable(shown),
        size=_size(info),
        mode=stat.S_IMODE(mode) & 0o777,
        permissions=permissions(info.st_mode),
        owner=printable(users.user_name(info.st_uid)),
        group=printable(users.group_name(info.st_gid)),
        modified_time=_time(info.st_mtime_ns),
        symlink_target=None if target is None else printable(target),
        metadata=metadata(path) if stat.S_ISREG(mode) else {},
    )


def _size(info: os.stat_result) -> int:
    """Return the size of an entry; that of a directory is at least one block.

    On btrfs the size of an empty directory is 0, on other file systems it is not. Clients take 0
    for an error.
    """
    return max(info.st_size, _BLOCK) if stat.S_ISDIR(info.st_mode) else info.st_size


def _kind(mode: int) -> FileType:
    if stat.S_ISREG(mode):
        return FileType.FILE
    return FileType.DIRECTORY if stat.S_ISDIR(mode) else FileType.UNSPECIFIED


def _time(nanoseconds: int) -> datetime:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    seconds = min(max(seconds, -62_135_596_800), _FARTHEST)
    return _EPOCH + timedelta(seconds=seconds, microseconds=rest // 1000)


def metadata(target: "str | int") -> dict[str, str]:
    """Return the metadata of a file, by path or descriptor."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listxattr(target):
            if name.startswith(XATTR_PREFIX):
                with contextlib.suppress(OSError):
                    value = os.getxattr(target, name).decode("utf-8", "replace")
                    found[printable(name.removeprefix(XATTR_PREFIX))] = value
    return found


def replace_metadata(fd: int, wanted: Mapping[str, str]) -> None:
    """Replace all metadata of an open file."""
    try:
        present = [n for n in os.listxattr(fd) if n.startswith(XATTR_PREFIX)]
    except OSError:
        present = []
    for name in present:
        if name.removeprefix(XATTR_PREFIX) not in wanted:
            os.removexattr(fd, name)
    for name, value in wanted.items():
        os.setxattr(fd, XATTR_PREFIX + name, value.encode())


def list_directory(path: str, depth: int, users: Users) -> list[EntryInfo]:
    """Return `depth` levels of entries, in lexical walk order."""
    root = os.path.realpath(path)
    found: list[EntryInfo] = []
    for real, shown in _walk(root, path, max(depth, 1)):
        if len(found) >= MAX_ENTRIES:
            raise TooManyEntriesError(f"more than {MAX_ENTRIES} entries: list a smaller part")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile
            found.append(describe(real, users, shown_as=shown))
    return found


def _walk(real: str, shown: str, depth: int) -> Iterator[tuple[str, str]]:
    pending = [(iter(_children(real)), real, shown)]
    while pending:
        children, real, shown = pending[-1]
        child = next(children, None)
        if child is None:
            pending.pop()
            continue
        name, is_directory = child
        below = (posixpath.join(real, name), posixpath.join(shown, name))
        yield below
        if is_directory and len(pending) < depth:
            with contextlib.suppress(OSError):  # unreadable or gone: listed itself, not entered
                pending.append((iter(_children(below[0])), *below))


def _children(path: str) -> list[tuple[str, bool]]:
    children: list[tuple[str, bool]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if len(children) > MAX_ENTRIES:
                raise TooManyEntriesError(f"{path!r} has more than {MAX_ENTRIES} entries")
            children.append((entry.name, entry.is_dir(follow_symlinks=False)))
    children.sort()
    return children
