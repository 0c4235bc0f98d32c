"""Download blobs: resumable, verified by digest, each one by one process at a time.

<directory>/<hex digest>        a complete blob
<directory>/<hex digest>.part   the beginning of one; the next attempt continues it
<directory>/<hex digest>.lock   held while it is downloaded
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import IO

import aiohttp

from paddock.kit.errors import InvalidError, UnavailableError
from paddock.runtime.local.images.registry.client import RegistryClient
from paddock.runtime.local.images.registry.manifests import Descriptor
from paddock.runtime.local.storage.reserve import DiskReserve

_CHUNK = 1 << 20
_ATTEMPTS = 5
"""Attempts in a row without a single new byte."""
_BACKOFF_SECONDS = (0.2, 1.0, 3.0, 10.0)
_LOCK_POLL_SECONDS = 0.05
_LOCK = ".lock"
_KEPT_SECONDS = 24 * 3600
"""How long an interrupted download is kept."""

_RESERVE_STEP_BYTES = 64 << 20
"""How often the space of the disk is checked."""

OnBytes = Callable[[int], None]
"""Called with the number of bytes that a blob has so far."""


class DownloadDirectory:
    """The blobs that are downloaded or waiting to be unpacked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, digest: str) -> Path:
        """Return the path of a complete blob."""
        return self._directory / digest.removeprefix("sha256:")

    def bytes_of(self, blob: Descriptor) -> int:
        """Return how many bytes of a blob are there already."""
        for path in (self.path(blob.digest), self._part(blob.digest)):
            with contextlib.suppress(FileNotFoundError):
                return min(path.stat().st_size, blob.size)
        return 0

    async def fetch(
        self,
        client: RegistryClient,
        blob: Descriptor,
        *,
        is_needed: Callable[[], Awaitable[bool]],
        on_bytes: OnBytes,
        reserve: DiskReserve | None = None,
    ) -> IO[bytes] | None:
        """Return a blob, opened; download it unless it is there.

        None: it is no longer needed once it is our turn. The file is opened while the lock is
        held, because another process that has unpacked the blob removes it.
        """
        async with self.locked(blob.digest):
            if not await is_needed():
                on_bytes(blob.size)
                return None
            path = self.path(blob.digest)
            # After a power failure, or from a manifest that lies about the size.
            if not path.exists() or path.stat().st_size != blob.size:
                await self._download(client, blob, _checking(reserve, blob, on_bytes))
            on_bytes(blob.size)
            return path.open("rb")

    async def _download(self, client: RegistryClient, blob: Descriptor, on_bytes: OnBytes) -> None:
        failures = 0
        while True:
            before = self.bytes_of(blob)
            try:
                return await self._attempt(client, blob, on_bytes)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                failures = 0 if self.bytes_of(blob) > before else failures + 1
                if failures >= _ATTEMPTS:
                    raise UnavailableError(
                        f"the download of {blob.digest[:19]} was interrupted: {error}",
                        hint="try again: it continues where it stopped",
                    ) from error
            await asyncio.sleep(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)])

    async def remove(self, digest: str) -> None:
        """Remove a blob that was unpacked; one that is being downloaded stays."""
        async with self.locked(digest):
            self.path(digest).unlink(missing_ok=True)

    async def discard(self, digest: str) -> None:
        """Remove a blob of an image that was refused, also the beginning of one."""
        async with self.locked(digest):
            self.path(digest).unlink(missing_ok=True)
            self._part(digest).unlink(missing_ok=True)

    async def _attempt(self, client: RegistryClient, blob: Descriptor, on_bytes: OnBytes) -> None:
        part = self._part(blob.digest)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            writer = await asyncio.to_thread(_Writer, file, blob.size)
            if writer.done < blob.size or not blob.size:
                async with client.blob(blob.digest, start=writer.done) as response:
                    if writer.done and not _continues_at(response, writer.done):
                        writer = _Writer(file)
                    await self._receive(response, blob, writer, on_bytes)
            if writer.done < blob.size:
                raise ConnectionError(f"{writer.done:,} of {blob.size:,} bytes arrived")
            if writer.digest != blob.digest:
                part.unlink()
                raise InvalidError(
                    f"the registry sent a blob with the digest {writer.digest} "
                    f"instead of {blob.digest}"
                )
            # A blob of this name is complete, also after a power failure.
            await asyncio.to_thread(os.fsync, file.fileno())
        part.rename(self.path(blob.digest))

    async def _receive(
        self,
        response: aiohttp.ClientResponse,
        blob: Descriptor,
        writer: "_Writer",
        on_bytes: OnBytes,
    ) -> None:
        """Write a response as it arrives."""
        async for piece in response.content.iter_any():
            if writer.done + len(piece) > blob.size:
                self._part(blob.digest).unlink()
                raise InvalidError(
                    f"the registry sent more than the {blob.size:,} bytes of {blob.digest[:19]}"
                )
            await asyncio.to_thread(writer.write, piece)
            on_bytes(writer.done)

    def _part(self, digest: str) -> Path:
        return self.path(digest).with_suffix(".part")

    @contextlib.asynccontextmanager
    async def locked(self, digest: str) -> AsyncGenerator[None]:
        """Hold the lock of a blob, also against other processes; released if this one is killed."""
        path = self.path(digest).with_suffix(_LOCK)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_POLL_SECONDS)
                    continue
                if _is_same(descriptor, path):
                    break
                # `remove_old` was faster: others lock a new file.
                os.close(descriptor)
                descriptor = os.open(path, flags, 0o600)
            yield
        finally:
            os.close(descriptor)


def remove_old(directory: Path) -> None:
    """Remove downloads that nobody continued for a day, below a directory.

    What is locked stays: a file that is held is not to be replaced by another of its name.
    """
    oldest = time.time() - _KEPT_SECONDS
    for parent, _, names in os.walk(directory):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                if path.stat().st_mtime >= oldest:
                    continue
                with path.with_suffix(_LOCK).open("ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _checking(reserve: DiskReserve | None, blob: Descriptor, on_bytes: OnBytes) -> OnBytes:
    """Return `on_bytes` that also raises `DiskFullError` when the disk's reserve is reached."""
    if reserve is None:
        return on_bytes
    checked = 0

    def check(done: int) -> None:
        nonlocal checked
        if done - checked >= _RESERVE_STEP_BYTES:
            checked = done
            reserve.ensure_room(f"download {blob.digest[:19]}")
        on_bytes(done)

    return check


class _Writer:
    """Appends to a file and computes the digest of its content. Blocks on the disk."""

    def __init__(self, file: IO[bytes], size: int = 0) -> None:
        """Continue what was written before: at most so many bytes, as the blob has."""
        self._file = file
        self._hash = hashlib.sha256()
        self.done = 0
        file.seek(0)
        while self.done < size and (known := file.read(min(_CHUNK, size - self.done))):
            self._hash.update(known)
            self.done += len(known)
        file.truncate(self.done)
        file.seek(self.done)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, piece: bytes) -> None:
        self._hash.update(piece)
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]
        self.done += len(piece)


def _continues_at(response: aiohttp.ClientResponse, start: int) -> bool:
    """Whether the response has the rest of the blob, not all of it."""
    given = response.headers.get("Content-Range", "")
    return response.status == 206 and given.startswith(f"bytes {start}-")
