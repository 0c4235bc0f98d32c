"""Files that clients upload for the steps COPY and ADD of template builds.

An upload is an archive that its client names by a hash of the files. The hash does not describe
the bytes of the archive, so it cannot be checked: each team has its own uploads. An upload is
written to a temporary file and renamed once it is complete. Teams receive uploads in turns, and
what is too much is deleted from the team that has most.
"""

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from paddock.builds.upload_offers import UploadOffer, UploadOffers
from paddock.kit import private_files
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidError,
    NotFoundError,
    TooLargeError,
)
from paddock.kit.fair.slots import FairSlots

MAX_BYTES = 4 << 30
MAX_TEAM_BYTES = 16 << 30
"""All uploads of a team. The least recently used ones are deleted for a new one."""
MAX_TEAM_FILES = 10_000
UPLOAD_SECONDS = 3600.0
"""Longest upload, with the wait for its turn. Clients give up after this time, too."""
STALL_SECONDS = 60.0
"""Longest wait for the next bytes."""
AT_ONCE, AT_ONCE_PER_TEAM = 16, 4
"""Uploads that are received at the same time; others wait for their turn."""
_CHECK_BYTES = 64 << 20
"""The space of the disk is checked after so many bytes."""
_HASH = re.compile(r"^[0-9a-f]{64}$")
_TEAM = re.compile(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
_PARTIAL = ".partial-"


def any_room(_doing: str, _needed_bytes: int = 0) -> None:
    """Accept any size."""


class Uploads:
    """Stores uploads below a directory: one directory for each team, one file for each hash."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        *,
        max_bytes: int = MAX_BYTES,
        max_team_bytes: int = MAX_TEAM_BYTES,
        ensure_room: Callable[[str, int], None] = any_room,
    ) -> None:
        """`ensure_room` raises `DiskFullError` if the disk has no room for so many bytes."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_team_bytes = max_team_bytes
        self._ensure_room = ensure_room
        self._offers = UploadOffers(clock)
        self._slots = FairSlots(total=AT_ONCE, per_group=AT_ONCE_PER_TEAM)
        self._partial: set[Path] = set()
        """Files of the uploads that are being received."""

    def path(self, team: str, digest: str) -> Path | None:
        """Return the file of a complete upload, or None. It counts as used now."""
        path = self._path(team, digest)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def offer(self, team: str, digest: str, *, key_id: str = "") -> str:
        """Return a token that allows one upload within `TOKEN_SECONDS`."""
        self._path(team, digest)
        return self._offers.add(team, digest, key_id)

    def offered(self, token: str) -> UploadOffer | None:
        """Return what a token allows, or None if it is unknown or has expired."""
        return self._offers.get(token)

    async def write(
        self, token: str, chunks: AsyncIterator[bytes], *, length: int | None = None
    ) -> int:
        """Store an upload and return its size; the token is used up. Nothing is kept on failure.

        `length` is the size that the client announced.
        """
        offer = self._accepted(token, length)
        limit = asyncio.timeout(UPLOAD_SECONDS)
        try:
            async with limit, self._slots.slot(offer.team):
                size = await self._store(offer, chunks, length)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceededError(
                f"the upload took longer than {UPLOAD_SECONDS:g} s", hint="upload fewer files"
            ) from error
        finally:
            offer.is_used = False
        self._offers.remove(token)
        return size

    async def _store(
        self, offer: UploadOffer, chunks: AsyncIterator[bytes], length: int | None
    ) -> int:
        self._ensure_room("store an upload", length or 0)
        target = self._path(offer.team, offer.digest)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = target.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        self._partial.add(partial)
        try:
            size = await self._receive(partial, _timely(chunks), length)
            await asyncio.to_thread(self._make_room, offer.team, size)
            partial.rename(target)
            await asyncio.to_thread(private_files.sync_directory, target.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            self._partial.discard(partial)
        return size

    def remove_unused(self, seconds: float, *, max_bytes: int | None = None) -> int:
        """Delete uploads unused for that long. Return how many were deleted.

        Above `max_bytes` the least recently used ones of the team that has most go, too: no team
        loses files because another one uploads.
        """
        # File times are wall time of the machine, as the file system writes them.
        limit, removed = time.time() - seconds, 0
        kept: dict[Path, list[tuple[float, int, Path]]] = {}
        paths = tuple(path for path in self._directory.glob("*/*") if path not in self._partial)
        for used, size, path in sorted(_files(paths), reverse=True):
            if used < limit:
                path.unlink(missing_ok=True)
                removed += 1
            else:
                kept.setdefault(path.parent, []).append((used, size, path))
        sums = {team: sum(size for _, size, _ in files) for team, files in kept.items()}
        while max_bytes is not None and sum(sums.values()) > max_bytes:
            team = max(sums, key=lambda team: sums[team])
            _, size, path = kept[team].pop()
            path.unlink(missing_ok=True)
            sums[team] -= size
            removed += 1
        return removed

    def _make_room(self, team: str, size: int) -> None:
        """Delete the least recently used uploads of a team that are too many with a new one."""
        found = _files(
            path for path in (self._directory / team).iterdir() if _HASH.match(path.name)
        )
        total, count = size + sum(used for _, used, _ in found), len(found) + 1
        for _, used, path in sorted(found):
            if total <= self._max_team_bytes and count <= MAX_TEAM_FILES:
                return
            path.unlink(missing_ok=True)
            total, count = total - used, count - 1

    def remove_partial(self) -> None:
        """Delete what an earlier process received only in part."""
        for path in self._directory.glob(f"*/{_PARTIAL}*"):
            if path not in self._partial:
                path.unlink(missing_ok=True)

    def _accepted(self, token: str, length: int | None) -> UploadOffer:
        offer = self.offered(token)
        if offer is None:
            raise NotFoundError(
                "the upload URL is unknown or has expired", hint="request a new one"
            )
        if offer.is_used:
            raise ConflictError("another request uploads to this URL")
        if length is not None and length > self._max_bytes:
            raise TooLargeError(f"the upload has {length} bytes; at most {self._max_bytes} fit")
        offer.is_used = True
        return offer

    async def _receive(
        self, partial: Path, chunks: AsyncIterator[bytes], length: int | None
    ) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        size = checked = 0
        with os.fdopen(os.open(partial, flags, private_files.MODE), "wb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > self._max_bytes:
                    raise TooLargeError(f"the upload has more than {self._max_bytes} bytes")
                if size - checked >= _CHECK_BYTES:
                    checked = size
                    self._ensure_room("store an upload", 0)
                await asyncio.to_thread(file.write, chunk)
            if length is not None and size != length:
                raise InvalidError(f"the upload ended after {size} of {length} bytes")
            # Its name says that it is complete, also after a power loss.
            await asyncio.to_thread(_sync, file)
        return size

    def _path(self, team: str, digest: str) -> Path:
        if not _HASH.match(digest):
            raise InvalidError(f"{digest!r} is not a SHA-256 hash in lower case hexadecimal")
        if not _TEAM.match(team):
            raise InvalidError(f"{team!r} is not the name of a team")
        return self._directory / team / digest


async def _timely(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the parts of a body; `DeadlineExceededError` if the client stops sending."""
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the upload was ended: no data arrived for {STALL_SECONDS:g} s"
            ) from error
        yield chunk


def _files(paths: Iterable[Path]) -> list[tuple[float, int, Path]]:
    """Return last use, size and path of files, without those that are deleted meanwhile."""
    found: list[tuple[float, int, Path]] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            facts = path.stat()
            found.append((facts.st_mtime, facts.st_size, path))
    return found


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
