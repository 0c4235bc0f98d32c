"""Framing of HTTP message bodies. Pure.

The framing of a body is parsed strictly and rewritten, so that two parsers can never disagree
about it. Chunk extensions are hop-by-hop and are dropped.
"""

import re

from msgspec import Struct

Field = tuple[bytes, bytes, bytes]
"""A raw header line, its name, its value."""

MAX_CHUNK_LINE = 1024
MAX_TRAILER_BYTES = 16 * 1024
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(
    rb"^(([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)\r\n)", re.MULTILINE
)
_NEVER_TRAILERS = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"host",
        b"authorization",
        b"cookie",
        b"set-cookie",
        b"x-access-token",
        b"e2b-traffic-access-token",
    )
)
"""Framing, routing and credentials: not allowed as trailers."""


class BadBody(Exception):  # noqa: N818 - about the sender's input, not an internal error
    """A chunked body that is ambiguous or malformed."""


class Framing(Struct, frozen=True):
    """How a body is delimited."""

    length: int | None = None
    """Content-Length in bytes, if given."""
    is_chunked: bool = False
    is_until_close: bool = False


NO_BODY = Framing(length=0)
CHUNKED = Framing(is_chunked=True)
UNTIL_CLOSE = Framing(is_until_close=True)


def fields(block: bytes) -> list[Field] | None:
    """Split a block of header lines; None if any of them is malformed."""
    found: list[tuple[bytes, bytes, bytes]] = _FIELD.findall(block)
    # Each match is one whole line, so equal counts mean that every line matched.
    if len(found) != block.count(b"\n"):
        return None
    return found


class ChunkedReader:
    """Decodes a chunked body incrementally."""

    __slots__ = ("_buffer", "_ended", "_left", "_needs_line_end", "rest", "trailers")

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0
        self._needs_line_end = False
        self._ended = False
        self.trailers: list[bytes] = []
        """Trailer lines to forward, once the body is complete."""
        self.rest = b""
        """Bytes after the body."""

    def feed(self, data: bytes) -> tuple[list[bytes], bool]:  # noqa: C901 - one loop, hot
        """Decode bytes; return pieces of the body and whether it is complete."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        pieces: list[bytes] = []
        at, end = 0, len(data)
        while True:
            if self._ended:
                return pieces, self._read_trailers(data[at:])
            if self._left:
                piece = data[at : at + self._left] if at or end > self._left else data
                if piece:
                    pieces.append(piece)
                    self._left -= len(piece)
                    at += len(piece)
                if self._left:
                    return pieces, False
            if self._needs_line_end:
                if end - at < 2:
                    self._keep(data[at:], b"\r\n")
                    return pieces, False
                if data[at : at + 2] != b"\r\n":
                    raise BadBody("a chunk is longer than its declared size")
                at += 2
                self._needs_line_end = False
            stop = data.find(b"\r\n", at)
            if stop < 0:
                self._keep_line(data[at:])
                return pieces, False
            self._begin(data[at:stop])
            at = stop + 2

    def _begin(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None or len(line) > MAX_CHUNK_LINE:
            raise BadBody("a chunk's size cannot be read")
        self._left = int(match[1], 16)
        self._needs_line_end = self._left > 0
        self._ended = self._left == 0

    def _keep(self, data: bytes, expected: bytes) -> None:
        if not expected.startswith(data):
            raise BadBody("a chunk is longer than its declared size")
        self._buffer = data

    def _keep_line(self, data: bytes) -> None:
        if len(data) > MAX_CHUNK_LINE or b"\n" in data:
            raise BadBody("a chunk's size cannot be read")
        self._buffer = data

    def _read_trailers(self, data: bytes) -> bool:
        if data.startswith(b"\r\n"):
            self.rest = data[2:]
            return True
        stop = data.find(b"\r\n\r\n")
        if stop < 0:
            if len(data) > MAX_TRAILER_BYTES:
                raise BadBody("the trailers are too large")
            self._buffer = data
            return False
        found = fields(data[: stop + 2])
        if found is None or stop > MAX_TRAILER_BYTES:
            raise BadBody("the trailers cannot be read")
        self.trailers = [line for line, name, _ in found if name.lower() not in _NEVER_TRAILERS]
        self.rest = data[stop + 4 :]
        return True


def chunk(data: bytes) -> bytes:
    """Return one piece of a body as a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def last_chunk(trailers: list[bytes]) -> bytes:
    """Return the end of a chunked body, with its trailers."""
    return b"0\r\n" + b"".join(trailers) + b"\r\n" if trailers else b"0\r\n\r\n"
