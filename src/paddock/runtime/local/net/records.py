"""What must be remembered of an attached sandbox beyond what the kernel holds: one file each.

A file is written before the kernel is changed and removed after, so a crash leaves at most a record
without a link, never the other way round. They need not survive a crash
of the machine, which takes the links with it, so nothing is synced.
"""

import contextlib
import os
import re
from pathlib import Path

import msgspec

from paddock.runtime.port import EgressPolicy

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_SUFFIX = ".json"
_UNDONE = ".new"
"""A record that is being written has this behind its name."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox of the fabric."""

    uid: str
    slot: int
    policy: EgressPolicy
    marks: tuple[int, ...]
    """Conntrack marks of this life, newest last."""


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(Record)


class Records:
    """The files of one fabric: `<uid>@<version>.json`.

    A new version is a new file, and the old one is removed after: some file systems write a file
    out at once when another is renamed over it, which takes milliseconds.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._versions: dict[str, int] = {}

    def load(self) -> tuple[dict[str, Record], list[str]]:
        """Read every record; also name the files that are broken, which are put aside."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found: dict[str, Record] = {}
        broken: list[str] = []
        for undone in self._directory.glob(f"*{_SUFFIX}{_UNDONE}"):  # a crash came before its end
            undone.unlink(missing_ok=True)
        paths = {path: _version(path.name) for path in self._directory.glob(f"*{_SUFFIX}")}
        for path, version in sorted(paths.items(), key=lambda item: item[1]):
            try:
                record = _decoder.decode(path.read_bytes())
            except msgspec.DecodeError:
                path.rename(path.with_suffix(".broken"))
                broken.append(path.name)
                continue
            if record.uid in found:  # A crash came between writing this and removing the last.
                self._path(record.uid).unlink(missing_ok=True)
            found[record.uid] = record
            self._versions[record.uid] = version
        return found, broken

    def save(self, record: Record) -> None:
        """Write one record."""
        uid = record.uid
        old = self._path(uid) if uid in self._versions else None
        version = self._versions.get(uid, 0) + 1
        path = self._directory / _name(uid, version)
        new = f"{path}{_UNDONE}"
        try:
            with open(new, "wb") as file:
                file.write(msgspec.json.encode(record))
            os.rename(new, path)
        except OSError:  # the disk is full
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            raise
        self._versions[uid] = version
        if old is not None:
            old.unlink(missing_ok=True)

    def forget(self, uid: str) -> None:
        """Remove one record; unknown ones are no error."""
        if uid in self._versions:
            self._path(uid).unlink(missing_ok=True)
            del self._versions[uid]

    def _path(self, uid: str) -> Path:
        return self._directory / _name(uid, self._versions[uid])


def is_uid(text: str) -> bool:
    """Say whether a text can be a sandbox's uid: a file's name and a link's alias."""
    return _UID.fullmatch(text) is not None


def _name(uid: str, version: int) -> str:
    return f"{uid}@{version}{_SUFFIX}"


def _version(name: str) -> int:
    digits = name.removesuffix(_SUFFIX).rpartition("@")[2]
    return int(digits) if digits.isdigit() else 0
