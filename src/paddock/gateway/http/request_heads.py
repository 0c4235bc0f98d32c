"""Parsing of request heads: strict, and cached.

Two parsers must never disagree about where a message ends (request smuggling), so everything
ambiguous is refused. Lines that are neither hop-by-hop nor for the gateway are forwarded byte for
byte. A client's requests differ in their request line and hardly in their headers, so parsed
header lines are cached. Rewriting is in `request_rewrite`, responses in `response_heads`, framing
in `bodies`.
"""

import re
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from paddock.gateway.http.bodies import CHUNKED, NO_BODY, Framing, fields
from paddock.kit import bearer
from paddock.resources.tokens import hashed

if TYPE_CHECKING:
    from paddock.gateway.routing.decision_cache import CachedDecision

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_CACHED_BYTES = 2048
"""Longer heads are not cached, to bound the size of the cache."""
_CACHE_SIZE = 1024

_REQUEST_LINE = re.compile(
    rb"([A-Z][A-Z_\-]{0,31}) ([\x21\x22\x24-\x7e\x80-\xff]+) HTTP/1\.([01])\r\n"
)
_HOST = re.compile(r"[A-Za-z0-9._\-]*(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")
_ABSOLUTE = re.compile(r"https?://([^/?]+)(.*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_API_KEY = re.compile(r"e2b_[0-9a-f]{40}")
"""The form of the keys that Paddock creates."""
_SIMPLE_CONNECTION = {word: frozenset((word,)) for word in (b"", b"keep-alive", b"close")}

(
    _DROP, _LENGTH_FIELD, _ENCODING, _HOST_FIELD, _UPGRADE, _CONNECTION, _EXPECT, _ACCEPT, _TEXT,
    _FORWARDED, _TOKEN, _CREDENTIAL, _BROWSER,
) = range(13)  # fmt: skip

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
    b"paddock-gateway": _TEXT,
    b"x-api-key": _CREDENTIAL,
    b"authorization": _CREDENTIAL,
    b"sec-fetch-site": _BROWSER,
    b"sec-fetch-mode": _BROWSER,
    b"origin": _BROWSER,
    b"service-worker": _BROWSER,
    b"x-forwarded-for": _FORWARDED,
    b"x-forwarded-proto": _FORWARDED,
    # Hop-by-hop, or written by the gateway itself.
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
    b"paddock-gateway": "gateway_signature",
}
_BROWSER_FIELDS = {
    b"sec-fetch-site": "fetch_site",
    b"sec-fetch-mode": "fetch_mode",
    b"origin": "page_origin",
    b"service-worker": "service_worker",
}


class BadHead(Exception):  # noqa: N818 - about the sender's input, not an internal error
    """The head is ambiguous or malformed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class RequestHead(Struct, gc=False):
    """A parsed request head. Shared between equal requests: do not change what it says."""

    method: str
    target: str
    is_http_1_1: bool
    lines: list[bytes]
    """Header lines that are forwarded unchanged."""
    decisions: "dict[str, CachedDecision | None]"
    """Cached decisions for these header lines, by client origin; None after the first request."""
    line: bytes = b""
    """The request line, if it can be forwarded unchanged."""
    framing: Framing = NO_BODY
    host: str = ""
    is_host_bad: bool = False
    is_keep_alive: bool = True
    is_kept: bool = True
    """Whether the client's connection can serve another request afterwards."""
    upgrade: bytes | None = None
    expects_continue: bool = False
    accepts_html: bool = False
    passed: bytes = b""
    """`lines`, joined."""
    access_token: str | None = None
    access_token_hash: str = ""
    traffic_token: str | None = None
    sandbox: str | None = None
    port: str | None = None
    ingress: str | None = None
    forwarded_for: bytes = b""
    forwarded_proto: bytes = b""
    gateway_signature: str | None = None
    """What another gateway has signed this request with."""
    api_lines: bytes = b""
    """Credentials of Paddock's APIs. Only the API receives them."""
    has_credentials: bool = False
    """Whether there is an API key or an Authorization header, of any kind."""
    fetch_site: bytes = b""
    """Where the page that caused the request is from, as browsers report it."""
    fetch_mode: bytes = b""
    page_origin: bytes = b""
    service_worker: bytes = b""
    allowed_by: "CachedDecision | None" = None
    """The cached decision that this head was already checked against."""


class _CachedLines(Struct, gc=False):
    """Parsed header lines, and the last request that had them."""

    template: RequestHead
    line: bytes
    head: RequestHead


class RequestReader:
    """Parses request heads and caches parsed header lines."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        """`secrets`: tokens and keys of the APIs that do not have the form of an API key."""
        self._secrets = secrets
        # Two generations: entries not used while the young one fills up are dropped.
        self._young: dict[bytes, _CachedLines] = {}
        self._old: dict[bytes, _CachedLines] = {}

    def read(self, block: bytes) -> RequestHead:
        """Parse a head without its empty line; raises `BadHead` if it is ambiguous or malformed."""
        end = block.find(b"\r\n")
        # From the last digit of the HTTP version: the meaning of the lines depends on it.
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
        template = _read_lines(line, lines, self._secrets) if seen is None else seen.template
        head = _with_line(template, line)
        if len(line) + len(lines) <= MAX_CACHED_BYTES:
            if len(self._young) >= _CACHE_SIZE:
                self._old, self._young = self._young, {}
            self._young[lines] = _CachedLines(template, line, head)
        return head


def read_request(block: bytes) -> RequestHead:
    """Parse one head without a cache."""
    return RequestReader().read(block)


def _with_line(template: RequestHead, line: bytes) -> RequestHead:
    """Return the head with these header lines and this request line."""
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
    """Parse a target that is not a path."""
    head = replace(template, method=method, target=target)
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        # The host in the target wins over the Host header (RFC 9112, section 3.2.2).
        head.host = absolute[1]
        rest = absolute[2]
        head.target = rest if rest.startswith("/") else "/" + rest
        head.is_host_bad = not _HOST.fullmatch(head.host)
        # Cached decisions are by header lines, which may name another host.
        head.decisions = {}
    elif method == "CONNECT":
        raise BadHead(405, "CONNECT is not supported")
    elif not (target == "*" and method == "OPTIONS"):
        raise BadHead(400, "the request target must be a path")
    if head.is_host_bad:
        raise BadHead(400, "Invalid host")
    return head


def _read_lines(  # noqa: C901 - one pass over all lines
    line: bytes, block: bytes, secrets: tuple[str, ...]
) -> RequestHead:
    """Parse everything after the request line, from the last digit of the version on."""
    found = fields(block[3:]) if _REQUEST_LINE.fullmatch(line) else None
    if found is None:
        raise _malformed()
    if len(found) > MAX_HEADERS:
        raise BadHead(431, "the head has too many lines")
    lines: list[bytes] = []
    head = RequestHead("", "/", block[0] == 0x31, lines, {})
    private: list[bytes] = []
    length = encoding = host = None
    connection = b""
    for raw, name, value in found:
        lowered = name.lower()
        kind = _REQUEST_FIELDS.get(lowered)
        if kind is None:
            if b"_" not in name or lowered.replace(b"_", b"-") not in _REQUEST_FIELDS:
                # Some servers treat underscores as dashes, so such spoofed names are dropped.
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
            # envd checks it too.
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
        elif kind == _CREDENTIAL:
            head.has_credentials = True
            is_own = _is_own_credential(lowered, value.rstrip().decode("latin-1"), secrets)
            (private if is_own else lines).append(raw)
        else:
            _read_rare(head, kind, lowered, raw, value)
    if connection or not head.is_http_1_1 or head.upgrade is not None:
        _read_connection(head, connection, found, private)
    if length is not None or encoding is not None:
        head.framing = _request_framing(length, encoding, is_http_1_1=head.is_http_1_1)
    if host is None and head.is_http_1_1:
        raise BadHead(400, "Invalid host")
    head.host = host.decode("latin-1") if host else ""
    head.is_host_bad = not _HOST.fullmatch(head.host)
    head.is_kept = head.is_keep_alive and head.upgrade is None
    head.passed = b"".join(lines)
    head.api_lines = b"".join(private)
    if head.access_token is not None:
        head.access_token_hash = hashed(head.access_token)
    return head


def _is_own_credential(name: bytes, value: str, secrets: tuple[str, ...]) -> bool:
    """Whether this is a credential of Paddock's APIs, and not one of a program in a sandbox."""
    credential = value if name == b"x-api-key" else bearer.token_of(value)
    if credential is None:
        return False
    return _API_KEY.fullmatch(credential) is not None or bearer.is_known(credential, *secrets)


def _plain(raw: bytes, value: bytes) -> bytes:
    """Return a framing header's value; tabs are refused, since parsers disagree on them."""
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
    elif kind == _BROWSER:
        setattr(head, _BROWSER_FIELDS[name], value.strip().lower())
        head.lines.append(raw)


def _read_connection(
    head: RequestHead,
    value: bytes,
    found: list[tuple[bytes, bytes, bytes]],
    private: list[bytes],
) -> None:
    tokens = connection_tokens(value)
    if head.is_http_1_1:
        head.is_keep_alive = b"close" not in tokens
    else:
        head.is_keep_alive = b"keep-alive" in tokens and b"close" not in tokens
    if b"upgrade" not in tokens or not head.is_http_1_1:
        head.upgrade = None
    drop_named(head.lines, tokens, found)
    drop_named(private, tokens, found)


def connection_tokens(value: bytes) -> frozenset[bytes]:
    """Return the tokens of a Connection header, in lower case."""
    lowered = value.rstrip().lower()
    known = _SIMPLE_CONNECTION.get(lowered)
    if known is not None:
        return known
    return frozenset(item.strip() for item in lowered.split(b","))


def drop_named(
    lines: list[bytes], tokens: frozenset[bytes], found: list[tuple[bytes, bytes, bytes]]
) -> None:
    """Drop the header lines that Connection names: they are hop-by-hop. Framing stays."""
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
    """Whether this is one decimal number of at most 18 digits."""
    return _LENGTH.fullmatch(value.rstrip()) is not None
