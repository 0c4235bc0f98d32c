"""Reading a tar that is not trusted: headers of bounded size."""

import contextlib
import tarfile
import zlib
from collections.abc import Generator
from typing import Any

MAX_HEADER_BYTES = 1 << 20
_TEXT_HEADERS = frozenset(
    {
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    }
)
DAMAGE = (tarfile.TarError, zlib.error, EOFError, ValueError, OverflowError)
"""What reading and unpacking a damaged tar raises: times, owners and names may be impossible."""


class BoundedTarInfo(tarfile.TarInfo):
    """A member whose header is of bounded size: `tarfile` reads headers into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _TEXT_HEADERS and self.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]

    def _proc_sparse(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        with _bounded(archive):
            return super()._proc_sparse(archive)  # type: ignore[misc, no-any-return]

    def _proc_gnusparse_10(self, *arguments: Any) -> None:
        with _bounded(arguments[-1]):
            super()._proc_gnusparse_10(*arguments)  # type: ignore[misc]


class _BoundedReader:
    """The stream of an archive while the list of the parts of a sparse file is read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise tarfile.ReadError(f"a sparse file has a list of over {MAX_HEADER_BYTES:,} bytes")
        return self._stream.read(size)  # type: ignore[no-any-return]

    def tell(self) -> int:
        return self._stream.tell()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _bounded(archive: tarfile.TarFile) -> Generator[None, None, None]:
    stream: Any = archive.fileobj
    archive.fileobj = _BoundedReader(stream)  # type: ignore[assignment]
    try:
        yield
    finally:
        archive.fileobj = stream
