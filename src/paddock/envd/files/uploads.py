"""Writing uploaded bytes to files: opened safely, owned by the user, written in threads.

A small file is written by exactly one system call, because watchers count events. Parsing of the
request is in `upload_body.py`.
"""

import os
import zlib
from collections.abc import Iterator, Mapping

from paddock.envd.blocking import in_thread
from paddock.envd.files import entries, paths
from paddock.envd.users import User

_BATCH = 1 << 20
_INLINE = 256 << 10
_INFLATE_STEP = 1 << 20


class BadGzipError(Exception):
    """The body is not valid gzip."""


class NoSpaceError(Exception):
    """The disk has too little space for the file."""


class Upload:
    """One file being written."""

    def __init__(self, path: str, user: User, metadata: Mapping[str, str]) -> None:
        self.path = path
        self.metadata = metadata
        self._pieces: list[bytes] = []
        self._buffered = 0
        paths.make_parents(path, uid=user.uid, gid=user.gid)
        self._fd = paths.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            os.fchown(self._fd, user.uid, user.gid)
            entries.replace_metadata(self._fd, metadata)
        except BaseException:
            os.close(self._fd)
            raise

    async def write(self, data: bytes) -> None:
        """Buffer a chunk; write to disk once enough is buffered."""
        self._pieces.append(data)
        self._buffered += len(data)
        if self._buffered >= _BATCH:
            await self.flush()

    async def flush(self) -> None:
        """Write what is buffered."""
        pieces, self._pieces = self._pieces, []
        size, self._buffered = self._buffered, 0
        try:
            if 0 < size <= _INLINE:
                _write_all(self._fd, [b"".join(pieces)])
            elif size:
                await in_thread(_write_all, self._fd, pieces)
        except OSError as error:
            error.filename = self.path  # a descriptor has no name
            raise

    def close(self) -> None:
        """Close the file, complete or not."""
        os.close(self._fd)


def _write_all(fd: int, pieces: list[bytes]) -> None:
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]


class Inflater:
    """Decompresses a gzip body in chunks of at most a megabyte."""

    def __init__(self) -> None:
        self._engine = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            while data:
                if self._engine.eof:
                    self._engine = zlib.decompressobj(wbits=31)  # another member follows
                yield self._engine.decompress(data, _INFLATE_STEP)
                data = self._engine.unconsumed_tail or self._engine.unused_data
        except zlib.error as error:
            raise BadGzipError(f"the body is not valid gzip: {error}") from error

    def finish(self) -> None:
        """Raise `BadGzipError` if the body is truncated."""
        if not self._engine.eof:
            raise BadGzipError("the gzip body is truncated")


def require_space(path: str, size: int) -> None:
    """Raise `NoSpaceError` if `size` bytes do not fit on the disk of the path."""
    probe = path
    while True:
        probe = os.path.dirname(probe)
        try:
            usage = os.statvfs(probe)
            break
        except OSError:
            if probe == "/":
                return
    if usage.f_blocks and usage.f_bavail * usage.f_frsize < size:
        free = usage.f_bavail * usage.f_frsize
        raise NoSpaceError(f"not enough disk space: {size} bytes are needed, {free} are free")
