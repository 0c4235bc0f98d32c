"""Records of attached sandboxes: state that the kernel does not hold, one file each.

A file is written before the kernel is changed and removed after, so a crash leaves at most a record
without a link, never a link without a record. A crash of the machine removes the links too, so
files are not synced.
"""

import contextlib
import os
import re
from pathlib import Path

import msgspec

from paddock.runtime.port import EgressPolicy

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_SUFFIX = ".json"
_PARTIAL = ".new"
"""Suffix of a record that is being written."""


class NetworkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The stored state of one sandbox of the fabric."""

    uid: str
    slot: int
    policy: EgressPolicy
    marks: tuple[int, ...]
    """Conntrack marks since the last attach, newest last."""


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(NetworkRecord)


class NetworkRecords:
    """The files of one fabric: `<uid>@<version>.json`.

    A new version is a new file, and the old one is removed after: renaming over an existing file
    makes some file systems write it out at once, which takes milliseconds.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._versions: dict[str, int] = {}

    def load(self) -> tuple[dict[str, NetworkRecord], list[str]]:
        """Read all records; rename broken files to `.broken` and return their names too."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found: dict[str, NetworkRecord] = {}
        broken: list[str] = []
        for partial in self._directory.glob(f"*{_SUFFIX}{_PARTIAL}"):  # left by a crash
            partial.unlink(missing_ok=True)
        paths = {path: _version(path.name) for path in self._directory.glob(f"*{_SUFFIX}")}
        for path, version in sorted(paths.items(), key=lambda item: item[1]):
            try:
                record = _decoder.decode(path.read_bytes())
            except msgspec.DecodeError:
                path.rename(path.with_suffix(".broken"))
                broken.append(path.name)
                continue
            if record.uid in found:  # Crashed before the older version was removed.
                self._path(record.uid).unlink(missing_ok=True)
            found[record.uid] = record
            self._versions[record.uid] = version
        return found, broken

    def save(self, record: NetworkRecord) -> None:
        uid = record.uid
        old = self._path(uid) if uid in self._versions else None
        version = self._versions.get(uid, 0) + 1
        path = self._directory / _name(uid, version)
        new = f"{path}{_PARTIAL}"
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
        """Remove a record; unknown uids are ignored."""
        if uid in self._versions:
            self._path(uid).unlink(missing_ok=True)
            del self._versions[uid]

    def _path(self, uid: str) -> Path:
        return self._directory / _name(uid, self._versions[uid])


def is_uid(text: str) -> bool:
    """Whether a text is a valid uid: usable as file name and link alias."""
    return _UID.fullmatch(text) is not None


def _name(uid: str, version: int) -> str:
    return f"{uid}@{version}{_SUFFIX}"


def _version(name: str) -> int:
    digits = name.removesuffix(_SUFFIX).rpartition("@")[2]
    return int(digits) if digits.isdigit() else 0
