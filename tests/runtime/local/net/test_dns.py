"""Domain rules: names open addresses, only the right ones, and only for a while."""

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
    PATIENCE,
    PRIVATE_WEB,
    SECOND_NAME_SERVER,
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


async def test_names_resolve_where_the_internet_is_open(lab: Lab):
    lab.names.addresses["example.com"] = [WEB]
    box = await lab.sandbox()

    assert (await box.ask("example.com")).addresses == [WEB]
    assert (await box.ask("Example.COM", by_tcp=True)).addresses == [WEB]
    assert (await box.ask("missing.example.com")).code == NXDOMAIN


async def test_an_allowed_name_opens_its_addresses_and_no_others(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "evil.example": [OTHER_WEB]}
    box, neighbour = await lab.sandbox(names("example.com")), await lab.sandbox(CLOSED)
    assert await box.outcome(WEB) == PROHIBITED  # A raw address is not enough.

    assert (await box.ask("example.com")).addresses == [WEB]

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == PROHIBITED
    assert await neighbour.outcome(WEB) == PROHIBITED


async def test_a_name_that_is_not_allowed_is_refused_and_asked_of_nobody(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "secret.evil.example": [OTHER_WEB]}
    box, closed = await lab.sandbox(names("example.com")), await lab.sandbox(CLOSED)

    for name in ("secret.evil.example", "sub.example.com", "notexample.com", "com"):
        assert (await box.ask(name)).code == REFUSED
        assert (await box.ask(name, by_tcp=True)).code == REFUSED
    assert (await closed.ask("example.com")).code == REFUSED

    assert lab.names.asked == []


async def test_wildcards_open_every_name_below_but_not_itself(lab: Lab):
    lab.names.addresses = {"a.example.com": [WEB], "b.a.example.com": [OTHER_WEB]}
    box = await lab.sandbox(names("*.example.com"))

    assert (await box.ask("example.com")).code == REFUSED
    assert (await box.ask("a.example.com")).addresses == [WEB]
    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == PROHIBITED
    assert (await box.ask("b.a.example.com")).addresses == [OTHER_WEB]
    assert await box.outcome(OTHER_WEB) == "open"


async def test_aliases_are_followed(lab: Lab):
    lab.names.aliases = {"www.example.com": "edge.cdn.example"}
    lab.names.addresses = {"edge.cdn.example": [WEB]}
    box = await lab.sandbox(names("www.example.com"))

    assert (await box.ask("www.example.com")).addresses == [WEB]
    assert await box.outcome(WEB) == "open"


async def test_a_name_cannot_open_private_or_metadata_addresses(lab: Lab):
    lab.names.addresses = {"rebind.example.com": [PRIVATE_WEB, METADATA, "127.0.0.1"]}
    box = await lab.sandbox(names("rebind.example.com"))

    await box.ask("rebind.example.com")

    assert await box.outcome(PRIVATE_WEB) == PROHIBITED
    assert await box.outcome(METADATA) == PROHIBITED


async def test_an_address_closes_when_its_answer_runs_out_but_its_connections_stay(lab: Lab):
    await lab.fabric.close()
    await lab.open(min_answer_seconds=1)
    lab.names.addresses, lab.names.ttl = {"example.com": [WEB]}, 1
    box = await lab.sandbox(names("example.com"))
    opened: list[socket.socket] = []

    async def is_open_when_asked() -> bool:
        await box.ask("example.com")
        with contextlib.suppress(ConnectionRefusedError):  # it took us longer than the answer holds
            opened.append(await box.connect(WEB))
        return bool(opened)

    await eventually(is_open_when_asked)
    with opened.pop() as connection:
        assert await echo(connection) == b"hello"

        async def is_closed() -> bool:
            return await box.outcome(WEB) == PROHIBITED

        await eventually(is_closed)

        assert await echo(connection) == b"hello"
        await eventually(is_open_when_asked)
        opened.pop().close()


async def test_asking_again_prolongs_an_answer(lab: Lab):
    lab.names.addresses, lab.names.ttl = {"example.com": [WEB]}, 40
    box = await lab.sandbox(names("example.com"))
    await box.ask("example.com")
    lab.names.ttl = 4000
    await box.ask("example.com")

    listed = lab.run(lab.host, "nft list set inet paddock resolved")
    assert "timeout 1h6m40s" in listed


async def test_dropping_a_name_from_the_policy_closes_its_addresses_and_connections(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "example.org": [OTHER_WEB]}
    box = await lab.sandbox(names("example.com", "example.org"))
    await box.ask("example.com")
    await box.ask("example.org")
    with await box.connect(WEB) as dropped, await box.connect(OTHER_WEB) as kept:
        assert await echo(dropped) == await echo(kept) == b"hello"

        await lab.fabric.set_policy(box.uid, names("example.org"))

        with pytest.raises(ConnectionResetError):
            await echo(dropped)
        assert await echo(kept) == b"hello"
    assert await box.outcome(WEB) == PROHIBITED
    assert await box.outcome(OTHER_WEB) == "open"


async def test_adding_a_name_to_the_policy_opens_its_addresses_at_once(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "example.org": [OTHER_WEB]}
    box = await lab.sandbox(names("example.com"))
    assert (await box.ask("example.org")).code == REFUSED
    assert await box.outcome(OTHER_WEB) == PROHIBITED

    await lab.fabric.set_policy(box.uid, names("example.com", "example.org"))

    assert (await box.ask("example.org")).addresses == [OTHER_WEB]
    assert await box.outcome(OTHER_WEB) == "open"


async def test_a_closed_sandbox_that_asks_elsewhere_is_answered_by_us(lab: Lab):
    lab.names.addresses = {"example.com": [WEB], "evil.example": [OTHER_WEB]}
    box = await lab.sandbox(names("example.com"))

    assert (await box.ask("example.com", server="8.8.8.8")).addresses == [WEB]
    assert (await box.ask("evil.example", server=NAME_SERVER)).code == REFUSED
    assert (await box.ask("evil.example", server=NAME_SERVER, by_tcp=True)).code == REFUSED
    assert await box.outcome(WEB) == "open"


async def test_a_policy_can_name_its_own_servers(lab: Lab):
    own = NameServer()
    own.addresses = {"example.com": [OTHER_WEB]}
    await lab.name_server(SECOND_NAME_SERVER, own)
    lab.names.addresses = {"example.com": [WEB]}
    box = await lab.sandbox(EgressPolicy(dns_servers=(SECOND_NAME_SERVER,)))

    assert (await box.ask("example.com")).addresses == [OTHER_WEB]
    assert lab.names.asked == []


async def test_a_dead_server_is_passed_over(lab: Lab):
    await lab.fabric.close()
    (lab.directory / "resolv.conf").write_text(
        f"nameserver 198.51.100.77\nnameserver garbage\nnameserver {NAME_SERVER}\n"
    )
    await lab.open()
    lab.names.addresses = {"example.com": [WEB]}
    box = await lab.sandbox()

    assert (await box.ask("example.com")).addresses == [WEB]


async def test_a_long_answer_is_asked_again_by_tcp(lab: Lab):
    lab.names.truncates = True
    lab.names.addresses = {"example.com": [f"198.51.100.{last}" for last in range(1, 60)]}
    box = await lab.sandbox(names("example.com"))

    assert (await box.ask("example.com")).is_truncated
    assert len((await box.ask("example.com", by_tcp=True)).addresses) == 59
    assert await box.outcome(WEB) == "open"


async def test_a_long_answer_the_client_cannot_take_is_cut_by_us(lab: Lab):
    lab.names.addresses = {"example.com": [f"198.51.100.{last}" for last in range(1, 60)]}
    box = await lab.sandbox()

    assert (await box.ask("example.com")).is_truncated
    assert len((await box.ask("example.com", by_tcp=True)).addresses) == 59


async def test_garbage_hurts_nobody(lab: Lab):
    lab.names.addresses = {"example.com": [WEB]}
    box = await lab.sandbox()
    with netns.socket_in(box.netns_fd, socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((box.attachment.gateway, 53))
        for size in (0, 1, 11, 12, 13, 40, 511, 1200):
            one.send(os.urandom(size))
            one.send(question("example.com")[: min(size, 28)])
        one.send(b"\0\1\1\0\0\1\0\0\0\0\0\0" + b"\xc0\x0c\0\1\0\1")  # A name that is itself.
        one.send(question("example.com") * 5)
    for data in (b"\0", b"\xff\xff" + b"x" * 50, b"\0\5hello", b"\0\0"):
        with await box.connect(box.attachment.gateway, 53) as one:
            await asyncio.get_running_loop().sock_sendall(one, data)

    assert (await box.ask("example.com")).addresses == [WEB]
    assert set(lab.names.asked) == {"example.com"}


async def test_one_sandbox_cannot_occupy_the_resolver(lab: Lab):
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
        assert (await neighbour.ask("example.com")).addresses == [WEB]
        async with asyncio.timeout(PATIENCE):
            refused = await loop.sock_recv(one, 512)

    assert refused[3] & 0xF == SERVFAIL
    assert len(set(silent.asked)) <= 64


async def test_a_sandbox_cannot_open_addresses_without_end(lab: Lab):
    await lab.fabric.close()
    await lab.open(max_addresses=5)
    box = await lab.sandbox(names("*.example.com"))
    for last in range(1, 9):
        lab.names.addresses[f"n{last}.example.com"] = [f"198.51.100.{last}"]
        await box.ask(f"n{last}.example.com")

    assert lab.run(lab.host, "nft list set inet paddock resolved").count("expires") == 5
