"""The users that every sandbox needs, added to images that lack them.

SDKs act as `user` and as `root`. An image without one of them gets a small layer on top with the
missing lines of /etc/passwd, /etc/group and /etc/shadow, the home directories, and `sudo` for
`user` if the image has sudo. The layer is made once, when the image is imported, and named after
its content. `plan_accounts` decides, `write_layer` writes.
"""

import hashlib
import os
from pathlib import Path

from msgspec import Struct

from paddock.envd.process.shells import find_shell
from paddock.envd.users import is_id
from paddock.kit.errors import InvalidError
from paddock.runtime.local.images.merged_tree import MergedTree
from paddock.runtime.local.images.model import ImageFacts

USER = "user"
_FIRST_ID = 1000
_LAST_ID = 60000
_ID_COUNT = 1 << 16
"""A sandbox has ids below this."""
_SUDO = ("/usr/bin/sudo", "/bin/sudo", "/usr/local/bin/sudo")


class LayerEntry(Struct, frozen=True, kw_only=True):
    """A file (with text) or a directory of the layer."""

    path: str
    mode: int
    uid: int = 0
    gid: int = 0
    text: str | None = None


class AccountsPlan(Struct, frozen=True):
    """The facts of an image, and the entries of the layer that it needs, parents first."""

    facts: ImageFacts
    entries: tuple[LayerEntry, ...]

    @property
    def layer_id(self) -> str:
        """The name of the layer: equal content has equal names."""
        digest = hashlib.sha256()
        for entry in self.entries:
            facts = (entry.path, entry.mode, entry.uid, entry.gid, entry.text)
            digest.update(repr(facts).encode())  # escapes what is not UTF-8
        return f"accounts-{digest.hexdigest()[:32]}"


def plan_accounts(tree: MergedTree) -> AccountsPlan:
    """Return what an image has, and what it needs to serve `root` and `user`."""
    shell = find_shell(tree.is_program)
    passwd = tree.read("/etc/passwd") or ""
    people = [row for row in _rows(passwd, 7) if is_id(row[2]) and is_id(row[3])]
    names = [row[0] for row in people]
    entries: dict[str, LayerEntry] = {}
    lines: list[str] = []
    if "root" not in names:
        lines.append(f"root:*:0:0:root:/root:{shell or '/bin/sh'}")
        _add_home(tree, entries, "/root", 0, 0, 0o700)
    if USER not in names:
        group = tree.read("/etc/group") or ""
        uid, gid = _free_ids(people, _rows(group, 4))
        shadow = tree.read("/etc/shadow")
        mark = "*" if shadow is None else "x"
        lines.append(f"{USER}:{mark}:{uid}:{gid}::/home/{USER}:{shell or '/bin/sh'}")
        if USER not in [row[0] for row in _rows(group, 4)]:
            start = group or "root:x:0:\n"
            _add_file(tree, entries, "/etc/group", _with_lines(start, [f"{USER}:x:{gid}:"]))
        if shadow is not None:
            text = _with_lines(shadow, [f"{USER}:*:19000:0:99999:7:::"])
            _add_file(tree, entries, "/etc/shadow", text, mode=0o640)
        if any(tree.is_program(path) for path in _SUDO):
            rule = f"{USER} ALL=(ALL:ALL) NOPASSWD:ALL\n"
            _add_file(tree, entries, f"/etc/sudoers.d/{USER}", rule, mode=0o440)
        _add_home(tree, entries, f"/home/{USER}", uid, gid, 0o755)
    if lines:
        _add_file(tree, entries, "/etc/passwd", _with_lines(passwd, lines))
    users = dict.fromkeys([*names, *(line.partition(":")[0] for line in lines)])
    shown = tuple(name for name in users if name.isprintable())  # not what is not UTF-8
    return AccountsPlan(ImageFacts(shell=shell, users=shown), tuple(entries.values()))


def write_layer(plan: AccountsPlan, root: Path) -> None:
    """Write the entries of a layer into an empty directory."""
    is_privileged = os.geteuid() == 0  # a rootless sandbox has one id, that of the files
    for entry in plan.entries:
        path = root / entry.path.lstrip("/")
        if entry.text is None:
            path.mkdir()
        else:
            path.write_text(entry.text, "utf-8", "surrogateescape")
    for entry in reversed(plan.entries):  # a directory may not be writable with its own mode
        path = root / entry.path.lstrip("/")
        if is_privileged:
            os.chown(path, entry.uid, entry.gid)
        path.chmod(entry.mode)


def _add_file(
    tree: MergedTree, entries: dict[str, LayerEntry], path: str, text: str, *, mode: int = 0o644
) -> None:
    """Add a file; it keeps the mode and the owner of the one that it replaces."""
    if (place := _add_parents(tree, entries, path)) is None:
        return
    uid = gid = 0
    if (found := tree.find(path)) is not None and not found.is_directory:
        mode, uid, gid = found.info.st_mode & 0o7777, found.info.st_uid, found.info.st_gid
    entries[place] = LayerEntry(path=place, mode=mode, uid=uid, gid=gid, text=text)


def _add_home(
    tree: MergedTree, entries: dict[str, LayerEntry], path: str, uid: int, gid: int, mode: int
) -> None:
    """Add a home directory; an existing one becomes its user's, its content stays as it is."""
    found = tree.find(path)
    wanted = found.path if found is not None else path
    if wanted == "/":  # the image has a link there: the root directory keeps its owner
        return
    if (place := _add_parents(tree, entries, wanted)) is not None:
        entries[place] = LayerEntry(path=place, mode=mode, uid=uid, gid=gid)


def _add_parents(tree: MergedTree, entries: dict[str, LayerEntry], path: str) -> str | None:
    """Add the directories above a path as the image has them; return the resolved path."""
    if (place := tree.location(path)) is None:
        return None
    parts = place.strip("/").split("/")
    for count in range(1, len(parts)):
        parent = "/" + "/".join(parts[:count])
        if parent not in entries:
            found = tree.find(parent)
            entries[parent] = LayerEntry(
                path=parent,
                mode=found.info.st_mode & 0o7777 if found is not None else 0o755,
                uid=found.info.st_uid if found is not None else 0,
                gid=found.info.st_gid if found is not None else 0,
            )
    return place


def _free_ids(people: list[list[str]], groups: list[list[str]]) -> tuple[int, int]:
    """Return a uid and a gid for `user`: equal and unused, unless its group exists."""
    own = (row[2] for row in groups if row[0] == USER and is_id(row[2]))
    gid = next((int(number) for number in own if int(number) < _ID_COUNT), None)
    taken = {row[2] for row in (people if gid is not None else (*people, *groups))}
    uid = next((n for n in range(_FIRST_ID, _LAST_ID + 1) if str(n) not in taken), None)
    if uid is None:
        raise InvalidError(
            f"the image has no free id from {_FIRST_ID} to {_LAST_ID} for {USER!r}",
            hint=f"add a user {USER!r} to the image",
        )
    return uid, uid if gid is None else gid


def _rows(text: str, columns: int) -> list[list[str]]:
    rows = (line.split(":") for line in text.split("\n"))
    return [row for row in rows if len(row) >= columns and row[0]]


def _with_lines(text: str, lines: list[str]) -> str:
    start = f"{text}\n" if text and not text.endswith("\n") else text
    return start + "\n".join(lines) + "\n"
