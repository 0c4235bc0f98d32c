"""A streaming parser for multipart/form-data, without I/O.

Input may be split anywhere. Memory is bounded by one chunk and the head of one part.
"""

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import unquote_to_bytes

from msgspec import Struct

_MAX_HEAD = 64 << 10
_PARAMETER = re.compile(r';\s*([\w!#$%&\'+\-.^`|~]+\*?)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class MultipartError(ValueError):
    """The body is not multipart/form-data."""


class PartStart(Struct, frozen=True):
    """The start of a part."""

    name: str
    filename: str | None


class PartData(Struct, frozen=True):
    """Bytes of the current part."""

    data: bytes


class PartEnd(Struct, frozen=True):
    """The end of a part."""


MultipartEvent = PartStart | PartData | PartEnd
ParserState = Literal["preamble", "boundary", "head", "body", "epilogue"]


def parameters(header: str) -> Mapping[str, str]:
    """Return the parameters of a header such as Content-Disposition; RFC 5987 forms win."""
    found: dict[str, str] = {}
    extended: dict[str, str] = {}
    for name, raw in _PARAMETER.findall(header):
        value = _ESCAPED.sub(r"\1", raw[1:-1]) if raw.startswith('"') else raw.strip()
        if name.endswith("*") and value.count("'") >= 2:
            _, _, encoded = value.split("'", 2)
            data = unquote_to_bytes(encoded.encode("utf-8", "surrogateescape"))
            extended[name[:-1].lower()] = data.decode("utf-8", "surrogateescape")
        else:
            found.setdefault(name.lower(), value)
    return found | extended


class MultipartParser:
    """Turns bytes into events; complete once the closing boundary was seen."""

    def __init__(self, boundary: str) -> None:
        if not boundary or len(boundary) > 200:
            raise MultipartError("the multipart boundary is missing or too long")
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._buffer = b"\r\n"  # so that the first boundary is found like the others
        self._state: ParserState = "preamble"

    @property
    def is_complete(self) -> bool:
        """Whether the closing boundary was seen."""
        return self._state == "epilogue"

    def feed(self, data: bytes) -> list[MultipartEvent]:
        """Return the events that these bytes complete."""
        self._buffer += data
        events: list[MultipartEvent] = []
        while self._step(events):
            pass
        return events

    def _step(self, events: list[MultipartEvent]) -> bool:
        """Advance one state; return false when more input is needed."""
        if self._state == "body":
            return self._read_body(events)
        if self._state == "head":
            return self._read_head(events)
        if self._state == "boundary":
            return self._read_boundary()
        if self._state == "preamble":
            found = self._buffer.find(self._delimiter)
            if found < 0:
                self._buffer = self._buffer[-len(self._delimiter) :]
                return False
            self._buffer = self._buffer[found + len(self._delimiter) :]
            self._state = "boundary"
            return True
        self._buffer = b""
        return False

    def _read_boundary(self) -> bool:
        if self._buffer.startswith(b"--"):
            self._state = "epilogue"
            return True
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > 256:
                raise MultipartError("a boundary line is too long")
            return False
        if self._buffer[:end].strip(b" \t"):
            raise MultipartError("a boundary is followed by something else")
        # Keep the line end, so that a head without headers also ends with a blank line.
        self._buffer = self._buffer[end:]
        self._state = "head"
        return True

    def _read_head(self, events: list[MultipartEvent]) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or end > _MAX_HEAD:
            if len(self._buffer) > _MAX_HEAD:
                raise MultipartError("the head of a part is too large")
            return False
        head = self._buffer[:end].decode("utf-8", "surrogateescape")
        self._buffer = self._buffer[end + 2 :]  # keeps CRLF: an empty body's boundary needs it
        self._state = "body"
        disposition = ""
        for line in head.split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                disposition = value
        known = parameters(disposition)
        events.append(PartStart(known.get("name", ""), known.get("filename")))
        self._skip = 2
        return True

    _skip = 0

    def _read_body(self, events: list[MultipartEvent]) -> bool:
        found = self._buffer.find(self._delimiter)
        if found >= 0:
            if found > self._skip:
                events.append(PartData(self._buffer[self._skip : found]))
            events.append(PartEnd())
            self._buffer = self._buffer[found + len(self._delimiter) :]
            self._state = "boundary"
            return True
        # Keep what may be the start of a boundary.
        tail = self._buffer.rfind(b"\r", -len(self._delimiter) + 1)
        keep = len(self._buffer) if tail < 0 else tail
        if keep > self._skip:
            events.append(PartData(self._buffer[self._skip : keep]))
            self._buffer = self._buffer[keep:]
            self._skip = 0
        return False
