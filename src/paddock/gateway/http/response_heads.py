"""Response heads: parsed as strictly as request heads, and rewritten. Pure."""

import re
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from paddock.gateway.http.bodies import CHUNKED, NO_BODY, UNTIL_CLOSE, Framing, fields
from paddock.gateway.http.request_heads import (
    MAX_CACHED_BYTES,
    MAX_HEADERS,
    BadHead,
    connection_tokens,
    drop_named,
    is_length,
)

_CACHE_SIZE = 2048
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?\r\n")
_BODYLESS = frozenset((204, 304))
_DROP, _LENGTH, _ENCODING, _UPGRADE, _CONNECTION = range(5)
_FIELDS: dict[bytes, int] = {
    b"content-length": _LENGTH,
    b"transfer-encoding": _ENCODING,
    b"upgrade": _UPGRADE,
    b"connection": _CONNECTION,
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"proxy-authenticate": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
}


class ResponseHead(Struct, gc=False):
    """A parsed response head. Shared between equal responses: do not change it."""

    status: int
    reason: bytes
    lines: list[bytes]
    framing: Framing
    is_keep_alive: bool
    upgrade: bytes | None = None
    passed: bytes = b""
    """`lines`, joined."""
    whole_length: int = -1
    """The length of the body of a final response, if known; else -1."""
    usual: bytes = b""
    """The head for the common case: an HTTP/1.1 client with keep-alive."""


def read_response(block: bytes, *, method: str) -> ResponseHead:
    """Parse a response head; raises `BadHead` if it is ambiguous or malformed."""
    is_head = method == "HEAD"
    if len(block) <= MAX_CACHED_BYTES:
        return _read_cached(block, is_head)
    return _read_response(block, is_head)


def _read_response(block: bytes, is_head: bool) -> ResponseHead:  # noqa: C901 - one pass
    line = _STATUS_LINE.match(block)
    found = fields(block[line.end() :]) if line else None
    if line is None or found is None or len(found) > MAX_HEADERS:
        raise BadHead(502, "The response of the sandbox is not HTTP")
    status = int(line[2])
    lines: list[bytes] = []
    length = encoding = upgrade = None
    connection = b""
    for raw, name, value in found:
        kind = _FIELDS.get(name.lower())
        if kind is None:
            lines.append(raw)
        elif kind == _LENGTH:
            if length is not None and length != value:
                raise BadHead(502, "the response of the sandbox has two different lengths")
            if length is None:
                lines.append(raw)
            length = value
        elif kind == _ENCODING:
            encoding = value if encoding is None else encoding + b"," + value
        elif kind == _CONNECTION:
            connection = connection + b"," + value if connection else value
        elif kind == _UPGRADE:
            upgrade = value.rstrip()
    tokens = connection_tokens(connection)
    if len(tokens) > 1 or connection:
        drop_named(lines, tokens, found)
    keep = b"close" not in tokens if line[1] == b"1" else b"keep-alive" in tokens
    framing = _response_framing(status, length, encoding, is_head=is_head)
    passed = b"".join(lines)
    head = ResponseHead(status, line[3] or b"", lines, framing, keep, upgrade, passed)
    if status >= 200:
        head.whole_length = -1 if framing.length is None else framing.length
        head.usual = _write_response(head, keep_alive=True, is_http_1_1=True)
    return head


_read_cached = lru_cache(_CACHE_SIZE)(_read_response)


def _response_framing(
    status: int, length: bytes | None, encoding: bytes | None, *, is_head: bool
) -> Framing:
    if encoding is not None and length is not None:
        raise BadHead(502, "the sandbox framed its response in two ways")
    if length is not None and not is_length(length):
        raise BadHead(502, "the sandbox gave a Content-Length that is not one number")
    if is_head or status in _BODYLESS or status < 200:
        return NO_BODY
    if encoding is not None:
        if encoding.strip().lower() != b"chunked":
            raise BadHead(502, "the sandbox used a transfer encoding that is not supported")
        return CHUNKED
    return UNTIL_CLOSE if length is None else Framing(length=int(length))


def with_lines(head: ResponseHead, lines: list[bytes]) -> ResponseHead:
    """Return the head with other header lines."""
    changed = replace(head, lines=lines, passed=b"".join(lines))
    if head.usual:
        changed.usual = _write_response(changed, keep_alive=True, is_http_1_1=True)
    return changed


def write_response(head: ResponseHead, *, keep_alive: bool, is_http_1_1: bool) -> bytes:
    """Return the head that the client receives."""
    if keep_alive and is_http_1_1 and head.usual:
        return head.usual
    return _write_response(head, keep_alive=keep_alive, is_http_1_1=is_http_1_1)


def _write_response(head: ResponseHead, *, keep_alive: bool, is_http_1_1: bool) -> bytes:
    end = b"\r\n"
    framing = head.framing
    if is_http_1_1:
        if framing.is_chunked or framing.is_until_close:
            end = b"Transfer-Encoding: chunked\r\n\r\n"
    elif keep_alive:
        end = b"Connection: keep-alive\r\n\r\n"
    if head.status == 101 and head.upgrade is not None:
        end = b"Connection: Upgrade\r\nUpgrade: " + head.upgrade + b"\r\n" + end
    elif not keep_alive and head.status >= 200:
        end = b"Connection: close\r\n" + end
    return b"HTTP/1.1 %d %b\r\n%b%b" % (head.status, head.reason, head.passed, end)
