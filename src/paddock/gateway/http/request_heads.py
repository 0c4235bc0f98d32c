"""Heads of requests: read strictly, and once.

A proxy must never let two readers disagree about where a message ends, so whatever can be read
in two ways is refused. Lines that concern neither this hop nor the gateway go on byte for byte.
A client's requests differ in their first line and hardly in the others, so what those say is
read once and kept. What is sent on is `forwarding`'s business, answers are `answers`', bodies
`bodies`'.
"""

import re
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from paddock.gateway.http.bodies import CHUNKED, NO_BODY, Framing, fields
from paddock.resources.tokens import hashed

if TYPE_CHECKING:
    from paddock.gateway.routing.decision_cache import CachedDecision

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_CACHED_BYTES = 2048
"""Longer ones are read anew each time: what is kept stays small."""
_CACHE_SIZE = 1024

_REQUEST_LINE = re.compile(
    rb"([A-Z][A-Z_\-]{0,31}) ([\x21\x22\x24-\x7e\x80-\xff]+) HTTP/1\.([01])\r\n"
)
_HOST = re.compile(r"[A-Za-z0-9._\-]*(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")
_ABSOLUTE = re.compile(r"https?://([^/?]+)(.*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_SIMPLE_CONNECTION = {word: frozenset((word,)) for word in (b"", b"keep-alive", b"close")}

(
    _DROP, _LENGTH_FIELD, _ENCODING, _HOST_FIELD, _UPGRADE, _CONNECTION, _EXPECT, _ACCEPT, _TEXT,
    _FORWARDED, _TOKEN,
) = range(11)  # fmt: skip

_REQUEST_FIELDS: dict[bytes, int] = {
    b"content-length": _LENGTH_FIELD,
    b"transfer-encoding": _ENCODING,
    b"host": _HOST_FIELD,
    b"upgrade": _UPGRADE,
    b"connection": _CONNECTION,
    b"expect": _EXPECT,
    b"accept": _ACCEPT,
    b"x-access-token": _TOKEN,
    b"e2b-traffic-access-token": _TEXT,
    b"e2b-sandbox-id": _TEXT,
    b"e2b-sandbox-port": _TEXT,
    b"opensandbox-ingress-to": _TEXT,
    b"x-forwarded-for": _FORWARDED,
    b"x-forwarded-proto": _FORWARDED,
    # Of this hop, or ours to say.
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"proxy-authenticate": _DROP,
    b"proxy-authorization": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
    b"x-forwarded-host": _DROP,
    b"x-real-ip": _DROP,
    b"forwarded": _DROP,
}
_NEVER_NAMED = frozenset((b"", b"close", b"keep-alive", b"upgrade", b"content-length"))
_TEXT_FIELDS = {
    b"e2b-traffic-access-token": "traffic_token",
    b"e2b-sandbox-id": "sandbox",
    b"e2b-sandbox-port": "port",
    b"opensandbox-ingress-to": "ingress",
}


class BadHead(Exception):  # noqa: N818 - a finding about the sender, not an error of ours
    """The head cannot be read in exactly one way."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class RequestHead(Struct, gc=False):
    """What a client asked. Shared between requests that are alike: nobody changes what it says."""

    method: str
    target: str
    is_http_1_1: bool
    lines: list[bytes]
    """Header lines that go on as they came."""
    decisions: "dict[str, CachedDecision | None]"
    """What was decided for requests with these lines, by the client's origin; `None` after one."""
    line: bytes = b""
    """The first line, where it goes on as it came unless the target is written anew."""
    framing: Framing = NO_BODY
    host: str = ""
    is_host_bad: bool = False
    is_keep_alive: bool = True
    is_kept: bool = True
    """Whether the connection serves another request afterwards, as far as the client goes."""
    upgrade: bytes | None = None
    expects_continue: bool = False
    accepts_html: bool = False
    passed: bytes = b""
    """`lines` as they are sent on."""
    access_token: str | None = None
    access_token_hash: str = ""
    traffic_token: str | None = None
    sandbox: str | None = None
    port: str | None = None
    ingress: str | None = None
    forwarded_for: bytes = b""
    forwarded_proto: bytes = b""
    allowed_by: "CachedDecision | None" = None
    """The way that this very head was found to be free to go."""


class _CachedLines(Struct, gc=False):
    """What header lines say, and the last request that had them."""

    template: RequestHead
    line: bytes
    head: RequestHead


class RequestReader:
    """Reads heads, and remembers what header lines say."""

    def __init__(self) -> None:
        # Two generations: what is not asked for while the young one fills up is forgotten.
        self._young: dict[bytes, _CachedLines] = {}
        self._old: dict[bytes, _CachedLines] = {}

    def read(self, block: bytes) -> RequestHead:
        """Read a head, empty line excluded; `BadHead` where it can be read in two ways."""
        end = block.find(b"\r\n")
        # From the version's last digit: what lines mean depends on it.
        lines = block[end - 1 :]
        line = block[: end + 2]
        seen = self._young.get(lines)
        if seen is None:
            return self._read_new(line, lines)
        if seen.line == line:
            return seen.head
        head = _with_line(seen.template, line)
        if len(line) <= MAX_CACHED_BYTES:
            seen.head, seen.line = head, line
        return head

    def _read_new(self, line: bytes, lines: bytes) -> RequestHead:
        seen = self._old.get(lines)
        template = _read_lines(line, lines) if seen is None else seen.template
        head = _with_line(template, line)
        if len(line) + len(lines) <= MAX_CACHED_BYTES:
            if len(self._young) >= _CACHE_SIZE:
                self._old, self._young = self._young, {}
            self._young[lines] = _CachedLines(template, line, head)
        return head


def read_request(block: bytes) -> RequestHead:
    """Read one head, remembering nothing."""
    return RequestReader().read(block)


def _with_line(template: RequestHead, line: bytes) -> RequestHead:
    """Give the head that has these header lines and this first line."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _malformed()
    target = match[2].decode("latin-1")
    if target[0] != "/":
        return _read_unusual(template, match[1].decode(), target)
    if template.is_host_bad:
        raise BadHead(400, "Invalid host")
    return replace(template, method=match[1].decode(), target=target, line=line)


def _malformed() -> BadHead:
    return BadHead(400, "the request is not well-formed HTTP/1.1")


def _read_unusual(template: RequestHead, method: str, target: str) -> RequestHead:
    """Read a target that is no path."""
    head = replace(template, method=method, target=target)
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        # Whoever names the host in the target means that one.
        head.host = absolute[1]
        rest = absolute[2]
        head.target = rest if rest.startswith("/") else "/" + rest
        head.is_host_bad = not _HOST.fullmatch(head.host)
        # Shortcuts go by the lines, which say another host.
        head.decisions = {}
    elif method == "CONNECT":
        raise BadHead(405, "CONNECT is not offered")
    elif not (target == "*" and method == "OPTIONS"):
        raise BadHead(400, "the request target must be a path")
    if head.is_host_bad:
        raise BadHead(400, "Invalid host")
    return head


def _read_lines(line: bytes, block: bytes) -> RequestHead:  # noqa: C901 - one pass over all lines
    """Read what follows the first line, from its last digit on."""
    found = fields(block[3:]) if _REQUEST_LINE.fullmatch(line) else None
    if found is None:
        raise _malformed()
    if len(found) > MAX_HEADERS:
        raise BadHead(431, "the head has too many lines")
    lines: list[bytes] = []
    head = RequestHead("", "/", block[0] == 0x31, lines, {})
    length = encoding = host = None
    connection = b""
    for raw, name, value in found:
        lowered = name.lower()
        kind = _REQUEST_FIELDS.get(lowered)
        if kind is None:
            if b"_" not in name or lowered.replace(b"_", b"-") not in _REQUEST_FIELDS:
                # (With an underscore, some servers take one of these for the real one.)
                lines.append(raw)
        elif kind == _TEXT:
            field = _TEXT_FIELDS[lowered]
            if getattr(head, field) is not None:
                raise _twice(lowered)
            setattr(head, field, value.rstrip().decode("latin-1"))
        elif kind == _TOKEN:
            if head.access_token is not None:
                raise _twice(lowered)
            head.access_token = value.rstrip().decode("latin-1")
            # The sandbox's own daemon asks for it too.
            lines.append(raw)
        elif kind == _HOST_FIELD:
            if host is not None:
                raise BadHead(400, "Invalid host")
            host = value.rstrip()
        elif kind == _LENGTH_FIELD:
            if length is not None:
                raise BadHead(400, "Content-Length is given twice")
            length = _plain(raw, value)
            lines.append(raw)
        elif kind == _ENCODING:
            if encoding is not None:
                raise BadHead(400, "Transfer-Encoding is given twice")
            encoding = _plain(raw, value)
        elif kind == _CONNECTION:
            connection = connection + b"," + value if connection else value
        elif kind == _ACCEPT:
            head.accepts_html = b"text/html" in value
            lines.append(raw)
        else:
            _read_rare(head, kind, lowered, raw, value)
    if connection or not head.is_http_1_1 or head.upgrade is not None:
        _read_connection(head, connection, found)
    if length is not None or encoding is not None:
        head.framing = _request_framing(length, encoding, is_http_1_1=head.is_http_1_1)
    if host is None and head.is_http_1_1:
        raise BadHead(400, "Invalid host")
    head.host = host.decode("latin-1") if host else ""
    head.is_host_bad = not _HOST.fullmatch(head.host)
    head.is_kept = head.is_keep_alive and head.upgrade is None
    head.passed = b"".join(lines)
    if head.access_token is not None:
        head.access_token_hash = hashed(head.access_token)
    return head


def _plain(raw: bytes, value: bytes) -> bytes:
    """Give a framing header's value; a tab in it is space to some readers and not to others."""
    if b"\t" in raw:
        raise BadHead(400, "the body's framing is not well formed")
    return value


def _twice(name: bytes) -> BadHead:
    return BadHead(400, f"header {name.decode()} is given twice")


def _read_rare(head: RequestHead, kind: int, name: bytes, raw: bytes, value: bytes) -> None:
    if kind == _UPGRADE:
        head.upgrade = value.rstrip() or None
    elif kind == _EXPECT:
        if value.strip().lower() != b"100-continue":
            raise BadHead(417, "only 100-continue can be expected")
        head.expects_continue = True
        head.lines.append(raw)
    elif kind == _FORWARDED:
        if name == b"x-forwarded-for":
            before = head.forwarded_for
            head.forwarded_for = before + b", " + value if before else value
        else:
            head.forwarded_proto = value


def _read_connection(
    head: RequestHead, value: bytes, found: list[tuple[bytes, bytes, bytes]]
) -> None:
    tokens = connection_tokens(value)
    if head.is_http_1_1:
        head.is_keep_alive = b"close" not in tokens
    else:
        head.is_keep_alive = b"keep-alive" in tokens and b"close" not in tokens
    if b"upgrade" not in tokens or not head.is_http_1_1:
        head.upgrade = None
    drop_named(head.lines, tokens, found)


def connection_tokens(value: bytes) -> frozenset[bytes]:
    """Give what Connection says, in lower case."""
    lowered = value.rstrip().lower()
    known = _SIMPLE_CONNECTION.get(lowered)
    if known is not None:
        return known
    return frozenset(item.strip() for item in lowered.split(b","))


def drop_named(
    lines: list[bytes], tokens: frozenset[bytes], found: list[tuple[bytes, bytes, bytes]]
) -> None:
    """Drop the lines that Connection names: they concern this hop alone. Framing stays."""
    named = tokens - _NEVER_NAMED
    if named:
        dropped = {raw for raw, name, _ in found if name.lower() in named}
        lines[:] = [line for line in lines if line not in dropped]


def _request_framing(length: bytes | None, encoding: bytes | None, *, is_http_1_1: bool) -> Framing:
    if encoding is not None:
        if length is not None or not is_http_1_1:
            raise BadHead(400, "the body is framed in two ways")
        if encoding.strip().lower() != b"chunked":
            raise BadHead(501, "only chunked transfer encoding is understood")
        return CHUNKED
    if length is None:
        return NO_BODY
    if not is_length(length):
        raise BadHead(400, "Content-Length is not one number")
    return Framing(length=int(length))


def is_length(value: bytes) -> bool:
    """Say whether this is one number, of a size that means something."""
    return _LENGTH.fullmatch(value.rstrip()) is not None
