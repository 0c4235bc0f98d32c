"""Reading a tar that is not trusted: headers of bounded size."""

import tarfile
import zlib

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
