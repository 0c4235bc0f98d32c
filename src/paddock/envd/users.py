"""Users and groups of the sandbox, read from its own /etc/passwd and /etc/group.

Not through NSS, whose modules and configuration would be the sandbox's, loaded into envd.
Both files are untrusted: regular files only, bounded in size, malformed lines skipped.
"""

import os
import stat

from msgspec import Struct

_MAX_BYTES = 1 << 20
Stamp = tuple[int, int, int, int]


class User(Struct, frozen=True, kw_only=True):
    """A user of the sandbox."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


class Users:
    """The users of the sandbox; read again whenever a file changes."""

    def __init__(self, passwd: str, group: str) -> None:
        self._passwd = passwd
        self._group = group
        self._stamps: tuple[Stamp | None, Stamp | None] | None = None
        self._users: dict[str, User] = {}
        self._user_names: dict[int, str] = {}
        self._group_names: dict[int, str] = {}

    def assign(self, passwd: str, group: str) -> None:
        """Read other files from now on."""
        self._passwd, self._group, self._stamps = passwd, group, None

    def find(self, name: str) -> User | None:
        """Return a user by name or by number; a number needs no entry in the files."""
        self._refresh()
        if (user := self._users.get(name)) is not None or not is_id(name):
            return user
        uid = int(name)
        if (known := self._user_names.get(uid)) is not None:
            return self._users.get(known)
        # As container runtimes do.
        return User(name=str(uid), uid=uid, gid=0, groups=(0,), home="/", shell="")

    def user_name(self, uid: int) -> str:
        """Return the name of a uid, or the number if it has none."""
        return self._user_names.get(uid) or str(uid)

    def group_name(self, gid: int) -> str:
        """Return the name of a gid, or the number if it has none."""
        return self._group_names.get(gid) or str(gid)

    def group_id(self, name: str) -> int | None:
        """Return the gid of a group, or None."""
        self._refresh()
        return next((gid for gid, known in self._group_names.items() if known == name), None)

    def refresh(self) -> None:
        """Read changed files; `user_name` and `group_name` do not do that themselves."""
        self._refresh()

    def _refresh(self) -> None:
        stamps = (_stamp(self._passwd), _stamp(self._group))
        if stamps == self._stamps:
            return
        self._stamps = stamps
        members: dict[str, list[int]] = {}
        self._group_names = {}
        for fields in _rows(self._group, 4):
            gid = int(fields[2])
            self._group_names.setdefault(gid, fields[0])
            for member in filter(None, fields[3].split(",")):
                members.setdefault(member, []).append(gid)
        self._users = {}
        self._user_names = {}
        for fields in _rows(self._passwd, 7):
            name, uid, gid = fields[0], int(fields[2]), int(fields[3])
            groups = tuple(dict.fromkeys((gid, *members.get(name, ()))))[:64]
            home = fields[5] if fields[5].startswith("/") else "/"
            user = User(name=name, uid=uid, gid=gid, groups=groups, home=home, shell=fields[6])
            self._users.setdefault(name, user)
            self._user_names.setdefault(uid, name)


def _stamp(path: str) -> Stamp | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)


def _rows(path: str, width: int) -> list[list[str]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        pieces: list[bytes] = []
        left = _MAX_BYTES
        while left and (piece := os.read(fd, left)):
            pieces.append(piece)
            left -= len(piece)
    except OSError:
        return []
    finally:
        os.close(fd)
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    rows = [line.split(":") for line in text.split("\n")]
    return [row for row in rows if len(row) >= width and _is_valid(row, width)]


def _is_valid(row: list[str], width: int) -> bool:
    numbers = row[2:4] if width == 7 else row[2:3]
    return bool(row[0]) and all(is_id(number) for number in numbers)


def is_id(text: str) -> bool:
    """Whether a text is the number of a user or a group."""
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**32 - 1
