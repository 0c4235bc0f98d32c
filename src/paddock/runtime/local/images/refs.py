"""The manifests of stored images, by name: one file each, replaced atomically."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from paddock.runtime.local.images.model import Manifest, decode_manifest

_TEMPORARY = ".new-"
_SUFFIX = ".json"
_MARK_SECONDS = 30.0
"""How exactly the last use is known."""


class ImageRefs:
    """A directory of manifests. Names are canonical."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def get(self, name: str) -> Manifest | None:
        """Return the manifest of an image; `None` if there is no image of that name."""
        try:
            data = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        return decode_manifest(data, origin=name)

    def put(self, manifest: Manifest) -> None:
        """Write the manifest of an image, in place of an older one."""
        path = self._path(manifest.name)
        fresh = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        fresh.write_bytes(msgspec.json.encode(manifest))
        fresh.rename(path)

    def remove(self, name: str) -> None:
        """Remove a name; an unknown one is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._path(name).unlink()

    def mark_used(self, name: str, now: float) -> None:
        """Record that an image is used; the time is that of its file."""
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            if now - path.stat().st_mtime > _MARK_SECONDS:
                os.utime(path, (now, now))

    def last_used(self, name: str) -> float:
        """Return when an image was used last; 0 if there is none."""
        try:
            return self._path(name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def used_at(self, name: str) -> datetime | None:
        """Return when an image was used last; None if it is not stored here."""
        seconds = self.last_used(name)
        return datetime.fromtimestamp(seconds, UTC) if seconds else None

    def all(self) -> Iterator[Manifest]:
        """Yield all manifests in the order of their names."""
        for entry in sorted(os.listdir(self._directory)):
            if entry.endswith(_SUFFIX):
                name = unquote(entry.removesuffix(_SUFFIX))
                if (manifest := self.get(name)) is not None:  # else it was removed meanwhile
                    yield manifest

    def _path(self, name: str) -> Path:
        return self._directory / f"{quote(name, safe='')}{_SUFFIX}"
