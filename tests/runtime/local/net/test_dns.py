"""Domain rules: resolved names admit their addresses, only these, and for a limited time."""

import asyncio
import contextlib
import os
import socket

import pytest

from paddock.runtime.local.net import netns
from paddock.runtime.port import EgressPolicy
from tests.runtime.local.net.lab import (
    CLOSED,
    METADATA,
    NAME_SERVER,
    OTHER_WEB,
    PRIVATE_WEB,
    SECOND_NAME_SERVER,
    TIMEOUT,
    WEB,
    Lab,
    NameServer,
    echo,
    eventually,
    question,
)

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PROHIBITED = "ECONNREFUSED"
REFUSED, SERVFAIL, FORMERR, NXDOMAIN = 5, 2, 1, 3


def names(*allowed: str) -> EgressPolicy:
    return EgressPolicy(allow_internet=False, allow_out=allowed)


async def test_names_resolve_with_open_internet(lab: Lab):
    lab.names.addresses["example.com"] = [WEB]
    box = await lab.sandbox()

    assert (await box.resolve("example.com")).addresses == [WEB]
    assert (await box.resolve("Example.COM", by_tcp=True)).addresses == [WEB]
    assert (await box.resolve("missing.example.com")).code == NXDOMAIN


async def test_an_allowed_name_admits_only_its_addresses(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "evil.example": [OTHER_WEB]}
    box, neighbour = await lab.sandbox(names("example.com")), await lab.sandbox(CLOSED)
    assert await box.outcome(WEB) == PROHIBITED  # A raw address is not enough.

    assert (await box.resolve("example.com")).addresses == [WEB]

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == PROHIBITED
    assert await neighbour.outcome(WEB) == PROHIBITED


async def test_a_name_that_is_not_allowed_is_refused_without_an_upstream_query(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "secret.evil.example": [OTHER_WEB]}
    box, closed = await lab.sandbox(names("example.com")), await lab.sandbox(CLOSED)

    for name in ("secret.evil.example", "sub.example.com", "notexample.com", "com"):
        assert (await box.resolve(name)).code == REFUSED
        assert (await box.resolve(name, by_tcp=True)).code == REFUSED
    assert (await closed.resolve("example.com")).code == REFUSED

    assert lab.names.queries == []


async def test_a_wildcard_allows_every_name_below_but_not_itself(lab: Lab):
    lab.names.addresses = {"a.example.com": [WEB], "b.a.example.com": [OTHER_WEB]}
    box = await lab.sandbox(names("*.example.com"))

    assert (await box.resolve("example.com")).code == REFUSED
    assert (await box.resolve("a.example.com")).addresses == [WEB]
    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == PROHIBITED
    assert (await box.resolve("b.a.example.com")).addresses == [OTHER_WEB]
    assert await box.outcome(OTHER_WEB) == "open"


async def test_aliases_are_followed(lab: Lab):
    lab.names.aliases = {"www.example.com": "edge.cdn.example"}
    lab.names.addresses = {"edge.cdn.example": [WEB]}
    box = await lab.sandbox(names("www.example.com"))

    assert (await box.resolve("www.example.com")).addresses == [WEB]
    assert await box.outcome(WEB) == "open"


async def test_a_name_cannot_admit_private_or_metadata_addresses(lab: Lab):
    lab.names.addresses = {"rebind.example.com": [PRIVATE_WEB, METADATA, "127.0.0.1"]}
    box = await lab.sandbox(names("rebind.example.com"))

    await box.resolve("rebind.example.com")

    assert await box.outcome(PRIVATE_WEB) == PROHIBITED
    assert await box.outcome(METADATA) == PROHIBITED


async def test_an_address_expires_with_its_ttl_but_its_connections_stay(lab: Lab):
    await lab.fabric.close()
    await lab.open(min_answer_seconds=1)
    lab.names.addresses, lab.names.ttl = {"example.com": [WEB]}, 1
    box = await lab.sandbox(names("example.com"))
    opened: list[socket.socket] = []

    async def is_open_after_query() -> bool:
        await box.resolve("example.com")
        with contextlib.suppress(ConnectionRefusedError):  # the answer had expired already
            opened.append(await box.connect(WEB))
        return bool(opened)

    await eventually(is_open_after_query)
    with opened.pop() as connection:
        assert await echo(connection) == b"hello"

        async def is_closed() -> bool:
            return await box.outcome(WEB) == PROHIBITED

        await eventually(is_closed)

        assert await echo(connection) == b"hello"
        await eventually(is_open_after_query)
        opened.pop().close()


async def test_another_query_extends_the_admission(lab: Lab):
    lab.names.addresses, lab.names.ttl = {"example.com": [WEB]}, 40
    box = await lab.sandbox(names("example.com"))
    await box.resolve("example.com")
    lab.names.ttl = 4000
    await box.resolve("example.com")

    listed = lab.run(lab.host, "nft list set inet paddock resolved")
    assert "timeout 1h6m40s" in listed


async def test_removing_a_name_from_the_policy_closes_its_addresses_and_connections(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "example.org": [OTHER_WEB]}
    box = await lab.sandbox(names("example.com", "example.org"))
    await box.resolve("example.com")
    await box.resolve("example.org")
    with await box.connect(WEB) as dropped, await box.connect(OTHER_WEB) as kept:
        assert await echo(dropped) == await echo(kept) == b"hello"

        await lab.fabric.set_policy(box.uid, names("example.org"))

        with pytest.raises(ConnectionResetError):
            await echo(dropped)
        assert await echo(kept) == b"hello"
    assert await box.outcome(WEB) == PROHIBITED
    assert await box.outcome(OTHER_WEB) == "open"


async def test_adding_a_name_to_the_policy_takes_effect_at_once(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "example.org": [OTHER_WEB]}
    box = await lab.sandbox(names("example.com"))
    assert (await box.resolve("example.org")).code == REFUSED
    assert await box.outcome(OTHER_WEB) == PROHIBITED

    await lab.fabric.set_policy(box.uid, names("example.com", "example.org"))

    assert (await box.resolve("example.org")).addresses == [OTHER_WEB]
    assert await box.outcome(OTHER_WEB) == "open"


async def test_queries_of_a_closed_sandbox_to_other_resolvers_are_redirected(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "evil.example": [OTHER_WEB]}
    box = await lab.sandbox(names("example.com"))

    assert (await box.resolve("example.com", server="8.8.8.8")).addresses == [WEB]
    assert (await box.resolve("evil.example", server=NAME_SERVER)).code == REFUSED
    assert (await box.resolve("evil.example", server=NAME_SERVER, by_tcp=True)).code == REFUSED
    assert await box.outcome(WEB) == "open"


async def test_a_policy_can_set_its_own_name_servers(lab: Lab):
    own = NameServer()
    own.addresses = {"example.com": [OTHER_WEB]}
    await lab.name_server(SECOND_NAME_SERVER, own)
    lab.names.addresses = {"example.com": [WEB]}
    box = await lab.sandbox(EgressPolicy(dns_servers=(SECOND_NAME_SERVER,)))

    assert (await box.resolve("example.com")).addresses == [OTHER_WEB]
    assert lab.names.queries == []


async def test_a_dead_name_server_is_skipped(lab: Lab):
    await lab.fabric.close()
    (lab.directory / "resolv.conf").write_text(
        f"nameserver 198.51.100.77\nnameserver garbage\nnameserver {NAME_SERVER}\n"
    )
    await lab.open()
    lab.names.addresses = {"example.com": [WEB]}
    box = await lab.sandbox()

    assert (await box.resolve("example.com")).addresses == [WEB]


async def test_a_truncated_answer_can_be_queried_by_tcp(lab: Lab):
    lab.names.truncates = True
    lab.names.addresses = {"example.com": [f"198.51.100.{last}" for last in range(1, 60)]}
    box = await lab.sandbox(names("example.com"))

    assert (await box.resolve("example.com")).is_truncated
    assert len((await box.resolve("example.com", by_tcp=True)).addresses) == 59
    assert await box.outcome(WEB) == "open"


async def test_an_answer_too_long_for_udp_is_truncated(lab: Lab):
    lab.names.addresses = {"example.com": [f"198.51.100.{last}" for last in range(1, 60)]}
    box = await lab.sandbox()

    assert (await box.resolve("example.com")).is_truncated
    assert len((await box.resolve("example.com", by_tcp=True)).addresses) == 59


async def test_malformed_queries_do_not_stop_the_resolver(lab: Lab):
    lab.names.addresses = {"example.com": [WEB]}
    box = await lab.sandbox()
    with netns.socket_in(box.netns_fd, socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((box.attachment.gateway, 53))
        for size in (0, 1, 11, 12, 13, 40, 511, 1200):
            one.send(os.urandom(size))
            one.send(question("example.com")[: min(size, 28)])
        one.send(
            b"\0\1\1\0\0\1\0\0\0\0\0\0" + b"\xc0\x0c\0\1\0\1"
        )  # A compression pointer to itself.
        one.send(question("example.com") * 5)
    for data in (b"\0", b"\xff\xff" + b"x" * 50, b"\0\5hello", b"\0\0"):
        with await box.connect(box.attachment.gateway, 53) as one:
            await asyncio.get_running_loop().sock_sendall(one, data)

    assert (await box.resolve("example.com")).addresses == [WEB]
    assert set(lab.names.queries) == {"example.com"}


async def test_one_sandbox_cannot_exhaust_the_resolver(lab: Lab):
    silent = NameServer()
    silent.is_silent = True
    await lab.name_server(SECOND_NAME_SERVER, silent)
    lab.names.addresses = {"example.com": [WEB]}
    greedy = await lab.sandbox(EgressPolicy(dns_servers=(SECOND_NAME_SERVER,)))
    neighbour = await lab.sandbox()
    loop = asyncio.get_running_loop()
    with netns.socket_in(greedy.netns_fd, socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setblocking(False)
        one.connect((greedy.attachment.gateway, 53))
        for number in range(300):
            await loop.sock_sendall(one, question(f"n{number}.example.com", identity=number))
        assert (await neighbour.resolve("example.com")).addresses == [WEB]
        async with asyncio.timeout(TIMEOUT):
            refused = await loop.sock_recv(one, 512)

    assert refused[3] & 0xF == SERVFAIL
    assert len(set(silent.queries)) <= 64


async def test_the_number_of_admitted_addresses_is_limited(lab: Lab):
    await lab.fabric.close()
    await lab.open(max_addresses=5)
    box = await lab.sandbox(names("*.example.com"))
    for last in range(1, 9):
        lab.names.addresses[f"n{last}.example.com"] = [f"198.51.100.{last}"]
        await box.resolve(f"n{last}.example.com")

    assert lab.run(lab.host, "nft list set inet paddock resolved").count("expires") == 5
