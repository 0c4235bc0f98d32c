"""Parsing of DNS messages and netlink attributes, and address arithmetic."""

import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paddock.kit.errors import InvalidError, QuotaExceededError
from paddock.runtime.local.net.addresses import AddressPlan
from paddock.runtime.local.net.dns import messages as wire
from paddock.runtime.local.net.rtnetlink import attribute, attributes, nested, text
from paddock.runtime.local.net.settings import FabricSettings
from tests.runtime.local.net.lab import NameServer, Reply, question, write_name

pytestmark = pytest.mark.timeout(120)

labels = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=63)
domains = st.lists(labels, min_size=1, max_size=5).map(".".join).filter(lambda n: len(n) < 250)


@given(domains, st.integers(0, 65535), st.integers(1, 250))
def test_a_query_survives_a_round_trip(name: str, identity: int, kind: int):
    query = wire.parse_query(question(name.upper(), kind, identity))

    assert (query.name, query.id, query.type) == (name, identity, kind)
    again = wire.parse_query(wire.upstream_query(query, 7))
    assert (again.name, again.id, again.type) == (name, 7, kind)


@given(st.binary(max_size=600))
@example(question("example.com") + b"\0")
@example(b"\0\1\1\0\0\1\0\0\0\0\0\0\xc0\x0c\0\1\0\1")
@example(b"\0\1\1\0\0\1\0\0\0\0\0\0" + b"\x3f" + b"a" * 63)
def test_any_bytes_are_a_query_or_malformed(data: bytes):
    try:
        query = wire.parse_query(data)
    except wire.MalformedError:
        reply = wire.header_only_failure(data, wire.FORMERR)
        assert reply is None or (len(reply) == 12 and reply[2] & 0x80)
    else:
        assert wire.upstream_query(query, 1)[12:].startswith(query.question)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_reply_is_an_answer_or_malformed(head: bytes, tail: bytes):
    query = wire.parse_query(question("example.com"))
    start = struct.pack("!HHHHHH", 9, 0x8180, 1, 3, 0, 0) + query.question
    for data in (head, start + tail, start + b"\xc0\x0c\0\1\0\1" + tail):
        try:
            answer = wire.parse_answer(data, query, 9)
        except wire.MalformedError:
            continue
        assert all(0 <= ttl < 2**31 for _, ttl in answer.addresses)


@given(st.data())
def test_a_damaged_reply_never_yields_a_foreign_address(data: st.DataObject):
    names = NameServer()
    names.addresses = {"example.com": ["198.51.100.1", "198.51.100.2"]}
    query = wire.parse_query(question("example.com"))
    good = bytearray(names.reply(wire.upstream_query(query, 9), by_tcp=True) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        answer = wire.parse_answer(bytes(good), query, 9)
    except wire.MalformedError:
        return
    raw = bytes(good)
    assert all(address.packed in raw for address, _ in answer.addresses)


def reply_with(query: wire.DnsQuery, *records: bytes, flags: int = 0x8180) -> bytes:
    return (
        struct.pack("!HHHHHH", 9, flags, 1, len(records), 0, 0) + query.question + b"".join(records)
    )


def address_record(name: str, address: str, ttl: int = 60) -> bytes:
    return write_name(name) + struct.pack("!HHIH", 1, 1, ttl, 4) + IPv4Address(address).packed


def alias_record(name: str, target: str) -> bytes:
    raw = write_name(target)
    return write_name(name) + struct.pack("!HHIH", 5, 1, 60, len(raw)) + raw


def test_only_addresses_of_the_queried_name_and_its_aliases_count():
    query = wire.parse_query(question("www.example.com"))
    data = reply_with(
        query,
        address_record("c.example", "198.51.100.3"),
        alias_record("b.example", "c.example"),
        address_record("unrelated.example", "198.51.100.99"),
        alias_record("WWW.example.com", "B.example"),
        alias_record("c.example", "www.example.com"),
    )

    answer = wire.parse_answer(data, query, 9)

    assert answer.addresses == ((IPv4Address("198.51.100.3"), 60),)


def test_replies_with_another_question_or_id_are_rejected():
    query = wire.parse_query(question("example.com"))
    other = wire.parse_query(question("example.org"))
    good = reply_with(query, address_record("example.com", "198.51.100.3"))

    assert wire.parse_answer(good, query, 9).addresses
    for data, identity in ((good, 10), (reply_with(other), 9), (reply_with(query, flags=0), 9)):
        with pytest.raises(wire.MalformedError):
            wire.parse_answer(data, query, identity)


def test_a_dot_inside_a_label_is_not_a_separator():
    data = struct.pack("!HHHHHH", 1, 0x0100, 1, 0, 0, 0) + b"\x0bexample.com\0" + b"\0\1\0\1"

    assert wire.parse_query(data).name == "example\\046com"


def test_a_refusal_has_an_extended_error_for_edns_clients():
    extended = question("example.com")[:10] + b"\0\1" + question("example.com")[12:]
    extended += b"\0" + struct.pack("!HHIH", 41, 1232, 0, 0)
    plain, modern = wire.parse_query(question("example.com")), wire.parse_query(extended)

    for query in (plain, modern):
        data = wire.failure(query, wire.REFUSED, extended=wire.PROHIBITED, text="policy")
        assert (Reply(data).code, Reply(data).identity) == (wire.REFUSED, query.id)
        assert (b"policy" in data) is (query is modern)


def test_other_opcodes_are_not_supported():
    data = bytearray(question("example.com"))
    data[2] |= 0x28  # An update.
    with pytest.raises(wire.UnsupportedQueryError):
        wire.parse_query(bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes_can_be_parsed_as_attributes(data: bytes):
    assert sum(len(value) + 4 for _, value in attributes(data)) <= len(data) + 3


def test_attributes_survive_a_round_trip():
    packed = nested(18, text(1, "veth"), attribute(2, b"abc"))
    ((kind, inner),) = attributes(packed)

    assert kind == 18
    assert list(attributes(inner)) == [(1, b"veth\0"), (2, b"abc")]


@given(st.integers(0, 65532))
def test_everything_about_a_slot_follows_from_its_number(number: int):
    plan = AddressPlan("10.213.0.0/16", "pd-")
    slot = plan.slot(number)

    assert plan.slot_of_link(slot.link) == slot
    assert slot.ip in plan.subnet
    assert slot.ip not in (plan.gateway, plan.subnet[0], plan.subnet[-1])
    assert len(slot.link) < 16
    assert 2**30 <= slot.index < 2**31


def test_foreign_links_have_no_slot():
    plan = AddressPlan("10.213.0.0/16", "pd-")
    for name in ("eth0", "pd-", "pd-xyz", "pd-0a", "pd-A", "pd-fffff", "pd--1", "pd- 1", "xpd-1"):
        assert plan.slot_of_link(name) is None, name


def test_addresses_are_reused_round_robin():
    plan = AddressPlan("10.213.0.0/24", "pd-")
    assert plan.capacity == 253
    assert plan.free_slot({3, 4}, 2).number == 5
    assert plan.free_slot({0}, 252).number == 1
    with pytest.raises(QuotaExceededError):
        plan.free_slot(set(range(253)), 0)


@pytest.mark.parametrize("subnet", ["8.8.8.0/24", "10.0.0.1/16", "10.0.0.0/30", "fd00::/64", "x"])
def test_invalid_subnets_are_rejected(subnet: str):
    with pytest.raises(InvalidError, match="subnet"):
        AddressPlan(subnet, "pd-")


def test_numbered_fabrics_share_no_name_range_or_port() -> None:
    made = [FabricSettings.numbered(number, "/x") for number in range(100)]
    for field in ("subnet", "link_prefix", "table", "dns_port"):
        assert len({getattr(item, field) for item in made}) == 100
    plans = [AddressPlan(item.subnet, item.link_prefix) for item in made]
    assert len({plan.gateway for plan in plans}) == 100
