"""Sending a file over HTTP: whole, a range, compressed, or `304 Not Modified`.

Authorization and path resolution are in `routes.py`, header values in `http/headers.py`.
"""

import os
import posixpath
import zlib

from paddock.envd.blocking import in_thread
from paddock.envd.files import paths
from paddock.envd.http import headers
from paddock.envd.http.request import HttpError, HttpRequest

_CHUNK = 256 << 10
_SAMPLE = 64 << 10
_MAX_UNSIZED = 4 << 20


async def send(request: HttpRequest, path: str) -> None:
    """Send a file, or the requested range of it."""
    fd = paths.open_regular(path, os.O_RDONLY)
    with os.fdopen(fd, "rb", buffering=0) as file:
        info = os.fstat(fd)
        name = posixpath.basename(path)
        common = [
            ("Content-Type", headers.content_type(name, os.pread(fd, 512, 0))),
            ("Content-Disposition", headers.disposition(name)),
            ("Last-Modified", headers.format_date(info.st_mtime)),
            ("Vary", "Accept-Encoding"),
        ]
        if _respond_conditional(request, int(info.st_mtime), common):
            return
        requested = _requested_range(request, info)
        encoding = headers.choose_encoding(request.headers.get("accept-encoding"))
        if encoding is None:
            raise HttpError(406, "no acceptable encoding: gzip and identity are offered")
        if not info.st_size and (content := _read_unsized(fd)):
            request.respond(200, content, headers=common)
            return
        if (
            encoding == "gzip"
            and requested is None
            and request.method == "GET"
            and _is_compressible(fd)
        ):
            await _send_gzip(request, fd, common)
            return
        offset, length = requested or (0, info.st_size)
        common.append(("Accept-Ranges", "bytes"))
        if requested is not None:
            last = offset + length - 1
            common.append(("Content-Range", f"bytes {offset}-{last}/{info.st_size}"))
        request.start(206 if requested is not None else 200, common, length=length)
        await request.send_file(file, offset, length)


def _respond_conditional(
    request: HttpRequest, modified: int, common: list[tuple[str, str]]
) -> bool:
    """Respond to a conditional request that needs no body; return whether it was one."""
    unless = headers.parse_date(request.headers.get("if-unmodified-since"))
    if unless is not None and modified > unless:
        raise HttpError(412, "the file was modified since")
    since = headers.parse_date(request.headers.get("if-modified-since"))
    if since is not None and modified <= since and "if-none-match" not in request.headers:
        request.respond(304, headers=common[2:])
        return True
    return False


def _requested_range(request: HttpRequest, info: os.stat_result) -> tuple[int, int] | None:
    if info.st_size == 0:
        # Empty, or of /proc and /sys: its length is not known before it is read.
        return None
    condition = request.headers.get("if-range")
    if condition is not None and headers.parse_date(condition) != int(info.st_mtime):
        return None
    try:
        return headers.parse_range(request.headers.get("range"), info.st_size)
    except headers.UnsatisfiableRangeError:
        request.response_headers.append(("Content-Range", f"bytes */{info.st_size}"))
        raise HttpError(416, "the range lies outside the file") from None


def _read_unsized(fd: int) -> bytes:
    """Read a file of size 0: files of /proc and /sys often have content nevertheless."""
    pieces: list[bytes] = []
    offset = 0
    while offset < _MAX_UNSIZED and (piece := os.pread(fd, _SAMPLE, offset)):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _is_compressible(fd: int) -> bool:
    """Whether a sample of the file shrinks: most clients accept gzip without needing it."""
    sample = os.pread(fd, _SAMPLE, 0)
    return bool(sample) and len(zlib.compress(sample, 1)) < 0.9 * len(sample) + 64


async def _send_gzip(request: HttpRequest, fd: int, common: list[tuple[str, str]]) -> None:
    request.start(200, [*common, ("Content-Encoding", "gzip")])
    engine = zlib.compressobj(level=1, wbits=31)
    offset = 0
    while data := os.pread(fd, _CHUNK, offset):
        offset += len(data)
        if packed := await in_thread(engine.compress, data):
            await request.write(packed)
    await request.write(engine.flush(), is_last=True)
