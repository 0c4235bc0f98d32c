"""DNS messages: reading what sandboxes and servers send, writing what we answer. Pure.

Nothing read here is trusted: every length is checked, names are bounded, compression pointers only
lead backwards. What may be asked, and whom we ask, is `dns`' business.
"""

import struct
from ipaddress import IPv4Address

from msgspec import Struct

HEADER_SIZE = 12
TYPE_A, TYPE_CNAME, TYPE_OPT, TYPE_IXFR, TYPE_AXFR = 1, 5, 41, 251, 252
CLASS_IN = 1
FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 1, 2, 3, 4, 5
PROHIBITED = 18
"""Extended error: the resolver may not answer this client that question (RFC 8914)."""

_HEADER = struct.Struct("!HHHHHH")
_RECORD = struct.Struct("!HHIH")
_QR, _TC, _RD, _RA, _CD = 0x8000, 0x0200, 0x0100, 0x0080, 0x0010
_MAX_NAME = 255
_MAX_RECORDS = 512


class MalformedError(ValueError):
    """A message does not follow the protocol."""


class Query(Struct, frozen=True, kw_only=True):
    """A question a client asked."""

    id: int
    name: str
    """Lower case, without the final dot."""
    type: int
    is_internet: bool
    question: bytes
    """As it came, for echoing."""
    is_recursive: bool
    checks_disabled: bool
    udp_size: int | None
    """What the client takes by UDP, where it said so; then it also understands extensions."""
    wants_dnssec: bool = False


class Answer(Struct, frozen=True, kw_only=True):
    """What a server replied, as far as we look."""

    rcode: int
    is_truncated: bool
    addresses: tuple[tuple[IPv4Address, int], ...]
    """IPv4 addresses the asked name leads to, with their time to live in seconds."""


class UnsupportedQueryError(MalformedError):
    """A well-formed message of a kind we do not serve."""


def parse_query(data: bytes) -> Query:
    """Read a query; exactly one question and at most one extension record."""
    identity, flags, questions, answers, authorities, extras = _header(data)
    if flags & _QR:
        raise MalformedError("a response is not a query")
    if flags >> 11 & 0xF:
        raise UnsupportedQueryError("only standard queries are served")
    if questions != 1 or answers or authorities or extras > 1:
        raise MalformedError("not one question")
    name, at = _read_name(data, HEADER_SIZE, may_point=False)
    kind, family = _unpack("!HH", data, at)
    end = at + 4
    udp_size, wants_dnssec = None, False
    if extras:
        owner, at = _read_name(data, end, may_point=False)
        extra, size, extended, length = _RECORD.unpack(_slice(data, at, _RECORD.size))
        _slice(data, at + _RECORD.size, length)
        if extra != TYPE_OPT or owner:
            raise MalformedError("the extra record is not an extension")
        udp_size, wants_dnssec = max(512, size), bool(extended & 0x8000)
        at += _RECORD.size + length
    else:
        at = end
    if at != len(data):
        raise MalformedError("more than a query")
    return Query(
        id=identity,
        name=".".join(name),
        type=kind,
        is_internet=family == CLASS_IN,
        question=data[HEADER_SIZE:end],
        is_recursive=bool(flags & _RD),
        checks_disabled=bool(flags & _CD),
        udp_size=udp_size,
        wants_dnssec=wants_dnssec,
    )


def upstream_query(query: Query, identity: int) -> bytes:
    """Write the question anew for a server: nothing of the client's message is passed on but it."""
    flags = (_RD if query.is_recursive else 0) | (_CD if query.checks_disabled else 0)
    extension = b""
    if query.udp_size is not None:
        size = min(query.udp_size, 4096)
        dnssec = 0x8000 if query.wants_dnssec else 0
        extension = b"\0" + _RECORD.pack(TYPE_OPT, size, dnssec, 0)
    counts = (1, 0, 0, 1 if extension else 0)
    return _HEADER.pack(identity, flags, *counts) + query.question + extension


def parse_answer(data: bytes, query: Query, identity: int) -> Answer:
    """Read a server's reply to exactly this question; anything else is malformed."""
    replied, flags, questions, answers, _, _ = _header(data)
    if replied != identity or not flags & _QR or questions != 1:
        raise MalformedError("not the reply to this query")
    end = HEADER_SIZE + len(query.question)
    if data[HEADER_SIZE:end].lower() != query.question.lower():
        raise MalformedError("the reply is to another question")
    is_truncated = bool(flags & _TC)
    rcode = flags & 0xF
    try:
        addresses = _addresses(data, end, answers, query.name) if rcode == 0 else ()
    except MalformedError:
        if not is_truncated:
            raise
        addresses = ()  # Cut off in the middle of a record: the client asks again by TCP.
    return Answer(rcode=rcode, is_truncated=is_truncated, addresses=addresses)


def reply_from(data: bytes, query: Query) -> bytes:
    """Hand a server's reply on under the client's own number."""
    return struct.pack("!H", query.id) + data[2:]


def truncated(query: Query) -> bytes:
    """Tell a client to ask again by TCP."""
    return _reply(query, _TC, b"")


def failure(query: Query, rcode: int, *, extended: int | None = None, text: str = "") -> bytes:
    """Answer with an error, explained where the client understands explanations."""
    if extended is None or query.udp_size is None:
        return _reply(query, rcode, b"")
    said = text.encode()[:200]
    option = struct.pack("!HHH", 15, 2 + len(said), extended) + said
    extension = b"\0" + _RECORD.pack(TYPE_OPT, 1232, 0, len(option)) + option
    return _reply(query, rcode, extension)


def bare_failure(data: bytes, rcode: int) -> bytes | None:
    """Answer a message that could not be read, where at least its number can be; never a reply."""
    if len(data) < HEADER_SIZE or data[2] & 0x80:
        return None
    (identity,) = struct.unpack_from("!H", data)
    return _HEADER.pack(identity, _QR | rcode, 0, 0, 0, 0)


def _reply(query: Query, bits: int, extension: bytes) -> bytes:
    flags = _QR | _RA | (_RD if query.is_recursive else 0) | bits
    head = _HEADER.pack(query.id, flags, 1, 0, 0, 1 if extension else 0)
    return head + query.question + extension


def _addresses(data: bytes, at: int, count: int, asked: str) -> tuple[tuple[IPv4Address, int], ...]:
    """Follow aliases from the asked name; addresses of unrelated names do not count."""
    if count > _MAX_RECORDS:
        raise MalformedError("too many records")
    aliases: list[tuple[str, str]] = []
    found: list[tuple[str, IPv4Address, int]] = []
    for _ in range(count):
        labels, at = _read_name(data, at, may_point=True)
        kind, family, ttl, length = _RECORD.unpack(_slice(data, at, _RECORD.size))
        at += _RECORD.size
        content = _slice(data, at, length)
        owner = ".".join(labels)
        if family == CLASS_IN and kind == TYPE_CNAME:
            aliases.append((owner, ".".join(_read_name(data, at, may_point=True)[0])))
        elif family == CLASS_IN and kind == TYPE_A:
            if length != 4:
                raise MalformedError("an address of the wrong length")
            found.append((owner, IPv4Address(content), 0 if ttl >> 31 else ttl))
        at += length
    names = {asked}
    for _ in aliases:  # As often as the longest chain could need, whatever order they came in.
        names.update(target for owner, target in aliases if owner in names)
    return tuple((address, ttl) for owner, address, ttl in found if owner in names)


def _header(data: bytes) -> tuple[int, int, int, int, int, int]:
    return _HEADER.unpack(_slice(data, 0, HEADER_SIZE))


def _read_name(data: bytes, at: int, *, may_point: bool) -> tuple[list[str], int]:
    """Read a name; give its labels in lower case and where the data goes on."""
    labels: list[str] = []
    size = 0
    after: int | None = None
    limit = at
    while True:
        length = _slice(data, at, 1)[0]
        if length >= 0xC0:
            target = _unpack("!H", data, at)[0] & 0x3FFF
            # Always before everything read so far: a loop is impossible, not merely detected.
            if not may_point or not HEADER_SIZE <= target < limit:
                raise MalformedError("a pointer that leads nowhere")
            after = at + 2 if after is None else after
            at = limit = target
            continue
        if length > 63:
            raise MalformedError("a label of unknown kind")
        if length == 0:
            return labels, at + 1 if after is None else after
        size += length + 1
        if size > _MAX_NAME:
            raise MalformedError("a name that is too long")
        labels.append(_label(_slice(data, at + 1, length)))
        at += length + 1


def _label(raw: bytes) -> str:
    """Write a label so that no two different ones look alike: odd bytes, and dots, as `\\DDD`."""
    return "".join(
        chr(byte).lower() if 0x21 <= byte <= 0x7E and byte not in b".\\" else f"\\{byte:03}"
        for byte in raw
    )


def _slice(data: bytes, at: int, length: int) -> bytes:
    if at + length > len(data):
        raise MalformedError("cut short")
    return data[at : at + length]


def _unpack(form: str, data: bytes, at: int) -> tuple[int, ...]:
    return struct.unpack(form, _slice(data, at, struct.calcsize(form)))
