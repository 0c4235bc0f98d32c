"""Parse and write DNS messages. Pure functions.

Input is not trusted: every length is checked, names are bounded, compression pointers only lead
backwards. Policies are enforced in `server`, upstream servers are queried in `upstream`.
"""

import struct
from ipaddress import IPv4Address

from msgspec import Struct

HEADER_SIZE = 12
TYPE_A, TYPE_CNAME, TYPE_OPT, TYPE_IXFR, TYPE_AXFR = 1, 5, 41, 251, 252
CLASS_IN = 1
FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 1, 2, 3, 4, 5
PROHIBITED = 18
"""Extended DNS error "Prohibited": the client may not ask this question (RFC 8914)."""

_HEADER = struct.Struct("!HHHHHH")
_RECORD = struct.Struct("!HHIH")
_QR, _TC, _RD, _RA, _CD = 0x8000, 0x0200, 0x0100, 0x0080, 0x0010
_MAX_NAME = 255
_MAX_RECORDS = 512


class MalformedError(ValueError):
    """A message does not follow the protocol."""


class DnsQuery(Struct, frozen=True, kw_only=True):
    """A client's question."""

    id: int
    name: str
    """Lower case, without the final dot."""
    type: int
    is_internet: bool
    question: bytes
    """The raw question, to be repeated in the reply."""
    is_recursive: bool
    checks_disabled: bool
    udp_size: int | None
    """The client's UDP payload size; `None` if it does not support EDNS."""
    wants_dnssec: bool = False


class DnsAnswer(Struct, frozen=True, kw_only=True):
    """The parsed part of a server's reply."""

    rcode: int
    is_truncated: bool
    addresses: tuple[tuple[IPv4Address, int], ...]
    """IPv4 addresses of the queried name, with their TTL in seconds."""


class UnsupportedQueryError(MalformedError):
    """A well-formed message of an unsupported kind."""


def parse_query(data: bytes) -> DnsQuery:
    """Parse a query with exactly one question and at most one EDNS record."""
    identity, flags, questions, answers, authorities, extras = _header(data)
    if flags & _QR:
        raise MalformedError("expected a query, got a response")
    if flags >> 11 & 0xF:
        raise UnsupportedQueryError("only standard queries are served")
    if questions != 1 or answers or authorities or extras > 1:
        raise MalformedError("expected exactly one question")
    name, at = _read_name(data, HEADER_SIZE, may_point=False)
    kind, family = _unpack("!HH", data, at)
    end = at + 4
    udp_size, wants_dnssec = None, False
    if extras:
        owner, at = _read_name(data, end, may_point=False)
        extra, size, extended, length = _RECORD.unpack(_slice(data, at, _RECORD.size))
        _slice(data, at + _RECORD.size, length)
        if extra != TYPE_OPT or owner:
            raise MalformedError("the additional record is not EDNS (OPT)")
        udp_size, wants_dnssec = max(512, size), bool(extended & 0x8000)
        at += _RECORD.size + length
    else:
        at = end
    if at != len(data):
        raise MalformedError("trailing bytes after the query")
    return DnsQuery(
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


def upstream_query(query: DnsQuery, identity: int) -> bytes:
    """Write the query for a server; nothing but the question is copied from the client."""
    flags = (_RD if query.is_recursive else 0) | (_CD if query.checks_disabled else 0)
    extension = b""
    if query.udp_size is not None:
        size = min(query.udp_size, 4096)
        dnssec = 0x8000 if query.wants_dnssec else 0
        extension = b"\0" + _RECORD.pack(TYPE_OPT, size, dnssec, 0)
    counts = (1, 0, 0, 1 if extension else 0)
    return _HEADER.pack(identity, flags, *counts) + query.question + extension


def parse_answer(data: bytes, query: DnsQuery, identity: int) -> DnsAnswer:
    """Parse a server's reply to this question; any other message is malformed."""
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
        addresses = ()  # Truncated in the middle of a record: the client retries by TCP.
    return DnsAnswer(rcode=rcode, is_truncated=is_truncated, addresses=addresses)


def reply_from(data: bytes, query: DnsQuery) -> bytes:
    """Return a server's reply with the id of the client's query."""
    return struct.pack("!H", query.id) + data[2:]


def own_answer(query: DnsQuery, address: IPv4Address, ttl: int) -> bytes:
    """Return the address of a name that this resolver owns; no records for other types."""
    if query.type != TYPE_A:
        return _reply(query, 0, b"")
    # The owner is a pointer to the name in the question.
    record = b"\xc0\x0c" + _RECORD.pack(TYPE_A, CLASS_IN, ttl, 4) + address.packed
    head = _HEADER.pack(query.id, _QR | _RA | (_RD if query.is_recursive else 0), 1, 1, 0, 0)
    return head + query.question + record


def truncated(query: DnsQuery) -> bytes:
    """Return a truncated reply, upon which the client retries by TCP."""
    return _reply(query, _TC, b"")


def failure(query: DnsQuery, rcode: int, *, extended: int | None = None, text: str = "") -> bytes:
    """Return an error reply, with an extended error if the client supports EDNS."""
    if extended is None or query.udp_size is None:
        return _reply(query, rcode, b"")
    encoded = text.encode()[:200]
    option = struct.pack("!HHH", 15, 2 + len(encoded), extended) + encoded
    extension = b"\0" + _RECORD.pack(TYPE_OPT, 1232, 0, len(option)) + option
    return _reply(query, rcode, extension)


def header_only_failure(data: bytes, rcode: int) -> bytes | None:
    """Return an error reply to an unparsable query, or `None` for a response or a short message."""
    if len(data) < HEADER_SIZE or data[2] & 0x80:
        return None
    (identity,) = struct.unpack_from("!H", data)
    return _HEADER.pack(identity, _QR | rcode, 0, 0, 0, 0)


def _reply(query: DnsQuery, bits: int, extension: bytes) -> bytes:
    flags = _QR | _RA | (_RD if query.is_recursive else 0) | bits
    head = _HEADER.pack(query.id, flags, 1, 0, 0, 1 if extension else 0)
    return head + query.question + extension


def _addresses(
    data: bytes, at: int, count: int, queried: str
) -> tuple[tuple[IPv4Address, int], ...]:
    """Follow CNAMEs from the queried name; ignore addresses of unrelated names."""
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
                raise MalformedError("wrong length of an address")
            found.append((owner, IPv4Address(content), 0 if ttl >> 31 else ttl))
        at += length
    names = {queried}
    for _ in aliases:  # Often enough for the longest chain in any order.
        names.update(target for owner, target in aliases if owner in names)
    return tuple((address, ttl) for owner, address, ttl in found if owner in names)


def _header(data: bytes) -> tuple[int, int, int, int, int, int]:
    return _HEADER.unpack(_slice(data, 0, HEADER_SIZE))


def _read_name(data: bytes, at: int, *, may_point: bool) -> tuple[list[str], int]:
    """Read a name; return its labels in lower case and the offset after it."""
    labels: list[str] = []
    size = 0
    after: int | None = None
    limit = at
    while True:
        length = _slice(data, at, 1)[0]
        if length >= 0xC0:
            target = _unpack("!H", data, at)[0] & 0x3FFF
            # The target must be before everything read so far, so loops are impossible.
            if not may_point or not HEADER_SIZE <= target < limit:
                raise MalformedError("invalid compression pointer")
            after = at + 2 if after is None else after
            at = limit = target
            continue
        if length > 63:
            raise MalformedError("unknown label type")
        if length == 0:
            return labels, at + 1 if after is None else after
        size += length + 1
        if size > _MAX_NAME:
            raise MalformedError("the name is too long")
        labels.append(_label(_slice(data, at + 1, length)))
        at += length + 1


def _label(raw: bytes) -> str:
    """Decode a label unambiguously: dots, backslashes and non-printable bytes as `\\DDD`."""
    return "".join(
        chr(byte).lower() if 0x21 <= byte <= 0x7E and byte not in b".\\" else f"\\{byte:03}"
        for byte in raw
    )


def _slice(data: bytes, at: int, length: int) -> bytes:
    if at + length > len(data):
        raise MalformedError("truncated message")
    return data[at : at + length]


def _unpack(form: str, data: bytes, at: int) -> tuple[int, ...]:
    return struct.unpack(form, _slice(data, at, struct.calcsize(form)))
