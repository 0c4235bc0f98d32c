"""Limits of an import: a small archive must not fill the disk or the memory of the machine."""

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import InvalidError
from paddock.runtime.local.storage.reserve import DiskReserve

_RATIO_FROM_BYTES = 256 << 20
"""Images that are smaller than this when unpacked may be compressed by any ratio."""
_RESERVE_STEP_BYTES = 64 << 20
"""How often the space of the disk is checked, in unpacked bytes."""


class ImageLimits(Struct, frozen=True, kw_only=True):
    """What one image may have at most; the settings `image_max_*`."""

    max_bytes: int = 64 << 30
    """Unpacked, all layers together."""
    max_entries: int = 2_000_000
    max_file_bytes: int = 32 << 30
    max_ratio: int = 200
    """Unpacked bytes per byte of the archive."""


class ImportBudget:
    """Counts what one import unpacks, and raises `InvalidError` beyond a limit."""

    def __init__(
        self,
        limits: ImageLimits,
        *,
        packed_bytes: int,
        name: str,
        reserve: DiskReserve | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """`on_bytes` is called with the number of further bytes, and may refuse them."""
        self._limits = limits
        self._reserve = reserve
        self._on_bytes = on_bytes
        self._checked = 0
        self._packed = packed_bytes
        self._name = name
        self._entries = 0
        self._streamed = 0
        self._content = 0
        self._holes = 0

    def count_entry(self, name: str, size: int) -> None:
        """Count a file, directory or link that is about to be created."""
        self._entries += 1
        if self._entries > self._limits.max_entries:
            self._refuse("entries", f"more than {self._limits.max_entries:,} files and directories")
        if size > self._limits.max_file_bytes:
            self._refuse(
                "file_bytes", f"{name!r} with more than {self._limits.max_file_bytes:,} bytes"
            )
        # A sparse file has a large size and few bytes in the stream.
        self._content += size
        self._check_bytes(self._content)

    def count_stream(self, size: int) -> None:
        """Count bytes of an unpacked layer, whatever they are."""
        self._streamed += size
        self._check_bytes(self._streamed)
        if self._on_bytes is not None:
            self._on_bytes(size)
        if self._streamed - self._checked >= _RESERVE_STEP_BYTES:
            self._checked = self._streamed
            self.check_reserve()

    def count_holes(self, size: int) -> None:
        """Count bytes of a sparse file that are not in the layer, as if they were written.

        They take no space yet, but whoever copies the file may write them.
        """
        self._holes += size
        if self._on_bytes is not None:
            self._on_bytes(size)
        self.check_reserve(self._holes)

    def add_packed(self, size: int) -> None:
        """Count further bytes of the archive: those of a layer that is about to be unpacked."""
        self._packed += size

    def check_reserve(self, needed_bytes: int = 0) -> None:
        """Raise `DiskFullError` if less than the reserve of the disk would be left."""
        if self._reserve is not None:
            self._reserve.ensure_room(f"import {self._name}", needed_bytes)

    @property
    def content_bytes(self) -> int:
        """The bytes of all files that were counted."""
        return self._content

    def check_position(self, position: int) -> None:
        """Check the position that reading an archive has reached, or is about to reach."""
        self._check_bytes(position)

    def _check_bytes(self, size: int) -> None:
        if size > self._limits.max_bytes:
            self._refuse("bytes", f"more than {self._limits.max_bytes:,} bytes unpacked")
        if size > _RATIO_FROM_BYTES and size > self._limits.max_ratio * max(self._packed, 1):
            self._refuse(
                "ratio", f"more than {self._limits.max_ratio} bytes per byte of its archive"
            )

    def _refuse(self, what: str, found: str) -> None:
        raise InvalidError(
            f"cannot import {self._name}: it has {found}",
            hint=f"if you trust the image, raise the setting image_max_{what}",
        )


def packed_size(source: Path) -> int:
    """Return the size of an archive, or of all files of an OCI layout."""
    if not source.is_dir():
        return source.stat().st_size
    return sum(path.lstat().st_size for path in _files(source))


def count_directory(source: Path, budget: ImportBudget) -> None:
    """Count a directory that is about to be copied."""
    for directory, names, files in os.walk(source):
        for name in (*names, *files):
            facts = Path(directory, name).lstat()
            is_file = name in files
            budget.count_entry(name, facts.st_blocks * 512 if is_file else 0)


def _files(root: Path) -> list[Path]:
    return [Path(directory, name) for directory, _, names in os.walk(root) for name in names]
