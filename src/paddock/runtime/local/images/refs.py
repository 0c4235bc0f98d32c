"""The manifests of stored images, by name: one file each, replaced atomically and durably.

A file that cannot be read, as after damage of the disk, is logged and treated as missing: the image
can be pulled or imported again.
"""

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from paddock.kit import private_files
from paddock.kit.errors import InvalidError
from paddock.kit.logs import fields
from paddock.runtime.local.images.model import Manifest, decode_manifest

log = logging.getLogger(__name__)

_TEMPORARY = ".new-"
_SUFFIX = ".json"
_MARK_SECONDS = 30.0
"""How exactly the last use is known."""


class ImageRefs:
    """A directory of manifests. Names are canonical."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._damaged: set[str] = set()
        """Names whose damage was logged."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> Manifest | None:
        """Return the manifest of an image; `None` if there is no readable one of that name."""
        try:
            return decode_manifest(self._path(name).read_bytes(), origin=name)
        except FileNotFoundError:
            return None
        except InvalidError as error:
            if name not in self._damaged:
                self._damaged.add(name)
                log.warning("image manifest is damaged", extra=fields(image=name, error=str(error)))
            return None

    def put(self, manifest: Manifest) -> None:
        """Write the manifest of an image, in place of an older one."""
        path = self._path(manifest.name)
        fresh = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        with fresh.open("xb") as file:
            file.write(msgspec.json.encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        private_files.sync_directory(self._directory)
        self._damaged.discard(manifest.name)

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
