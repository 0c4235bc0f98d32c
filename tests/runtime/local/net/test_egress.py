"""Egress policies by address."""

import asyncio
import socket

import pytest

from paddock.kit.errors import InvalidError, NotFoundError
from paddock.runtime.local.net import netns
from paddock.runtime.port import EgressPolicy
from tests.runtime.local.net.lab import (
    CARRIER_WEB,
    CLOSED,
    HOST_PUBLIC,
    METADATA,
    OPEN,
    OTHER_WEB,
    PRIVATE_WEB,
    TIMEOUT,
    WEB,
    Lab,
    echo,
    eventually,
    udp_outcome,
)

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PROHIBITED = "ECONNREFUSED"


async def test_the_internet_is_open_by_default_and_sees_only_the_hosts_address(lab: Lab):
    box = await lab.sandbox()
    seen: list[str] = []
    await lab.datagrams(lab.internet, WEB, 9999, lambda _, data, sender: seen.append(sender[0]))

    assert await box.outcome(WEB) == "open"
    assert await udp_outcome(box.netns_fd, WEB, seconds=TIMEOUT) == "open"
    await udp_outcome(box.netns_fd, WEB, 9999)

    await eventually(lambda: seen)
    assert seen == ["203.0.113.2"]


@pytest.mark.parametrize("address", [PRIVATE_WEB, CARRIER_WEB, METADATA])
async def test_private_carrier_and_metadata_addresses_are_denied(lab: Lab, address: str):
    box = await lab.sandbox(OPEN)
    named = await lab.sandbox(EgressPolicy(allow_out=(f"{address}/32",)))

    assert await box.outcome(address) == PROHIBITED
    assert await named.outcome(address) == PROHIBITED
    assert await udp_outcome(box.netns_fd, address) != "open"


async def test_private_ranges_can_be_allowed_but_metadata_must_be_named(lab: Lab):
    box = await lab.sandbox(EgressPolicy(allow_private=True))
    named = await lab.sandbox(EgressPolicy(allow_private=True, allow_out=(METADATA,)))
    broad = await lab.sandbox(EgressPolicy(allow_private=True, allow_out=("128.0.0.0/1",)))

    assert await box.outcome(PRIVATE_WEB) == "open"
    assert await box.outcome(CARRIER_WEB) == "open"
    assert await box.outcome(METADATA) == PROHIBITED
    assert await broad.outcome(METADATA) == PROHIBITED
    assert await named.outcome(METADATA) == "open"


@pytest.mark.parametrize("policy", [CLOSED, EgressPolicy(deny_out=("0.0.0.0/0",))])
async def test_without_internet_all_egress_is_denied(lab: Lab, policy: EgressPolicy):
    box = await lab.sandbox(policy)

    assert await box.outcome(WEB) == PROHIBITED
    assert await udp_outcome(box.netns_fd, WEB) != "open"


async def test_only_denied_networks_are_denied(lab: Lab):
    box = await lab.sandbox(EgressPolicy(deny_out=("198.51.100.16/28",)))

    assert await box.outcome(WEB) == "open"
    assert await box.outcome(OTHER_WEB) == PROHIBITED


async def test_allow_takes_precedence_over_deny(lab: Lab):
    narrow = await lab.sandbox(EgressPolicy(deny_out=("198.51.100.0/24",), allow_out=(WEB,)))
    closed = await lab.sandbox(EgressPolicy(allow_internet=False, allow_out=("198.51.100.0/28",)))

    for box in (narrow, closed):
        assert await box.outcome(WEB) == "open"
        assert await box.outcome(OTHER_WEB) == PROHIBITED


async def test_policies_of_sandboxes_are_independent(lab: Lab):
    opened, closed = await lab.sandbox(OPEN), await lab.sandbox(CLOSED)

    assert await opened.outcome(WEB) == "open"
    assert await closed.outcome(WEB) == PROHIBITED


async def test_a_policy_change_resets_denied_flows_and_keeps_allowed_ones(lab: Lab):
    box = await lab.sandbox(OPEN)
    with await box.connect(WEB) as kept, await box.connect(OTHER_WEB) as cut:
        assert await echo(kept) == await echo(cut) == b"hello"

        await lab.fabric.set_policy(box.uid, EgressPolicy(deny_out=(OTHER_WEB,)))

        assert await echo(kept) == b"hello"
        with pytest.raises(ConnectionResetError):
            await echo(cut)
        assert await box.outcome(OTHER_WEB) == PROHIBITED

        await lab.fabric.set_policy(box.uid, OPEN)
        assert await box.outcome(OTHER_WEB) == "open"
        assert await echo(kept) == b"hello"


async def test_a_policy_change_drops_denied_incoming_streams(lab: Lab):
    box = await lab.sandbox(OPEN)
    sources = {}
    for address in (WEB, OTHER_WEB):
        sources[address] = await lab.datagrams(
            lab.internet, address, 7000, lambda back, data, sender: back.sendto(data, sender)
        )
    loop = asyncio.get_running_loop()
    with (
        netns.socket_in(box.netns_fd, socket.AF_INET, socket.SOCK_DGRAM) as denied,
        netns.socket_in(box.netns_fd, socket.AF_INET, socket.SOCK_DGRAM) as allowed,
    ):
        for one, address in ((denied, WEB), (allowed, OTHER_WEB)):
            one.setblocking(False)
            one.connect((address, 7000))
            assert await echo(one) == b"hello"

        await lab.fabric.set_policy(box.uid, EgressPolicy(deny_out=(WEB,)))

        # Neither socket sends again: incoming packets are evaluated. Masquerading keeps the source
        # port if it is free, as in the lab.
        for one, address in ((denied, WEB), (allowed, OTHER_WEB)):
            sources[address].sendto(b"news", (HOST_PUBLIC, one.getsockname()[1]))
        async with asyncio.timeout(TIMEOUT):
            assert await loop.sock_recv(allowed, 100) == b"news"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await loop.sock_recv(denied, 100)


async def test_an_invalid_policy_changes_nothing(lab: Lab):
    box = await lab.sandbox(CLOSED)

    with pytest.raises(InvalidError) as caught:
        await lab.fabric.set_policy(box.uid, EgressPolicy(deny_out=("nonsense/99",)))

    assert [problem.path for problem in caught.value.problems] == ["deny_out[0]"]
    assert await box.outcome(WEB) == PROHIBITED


async def test_a_policy_for_an_unknown_sandbox_is_an_error(lab: Lab):
    with pytest.raises(NotFoundError):
        await lab.fabric.set_policy("nobody", OPEN)


async def test_nested_and_shrinking_networks_are_replaced_live(lab: Lab):
    box = await lab.sandbox(EgressPolicy(allow_internet=False, allow_out=("198.51.100.0/24",)))
    for allowed, expected in (
        (("198.51.100.0/28",), ("open", PROHIBITED)),
        (("198.51.0.0/16", "198.51.100.0/28"), ("open", "open")),
        (("198.51.100.16/28", OTHER_WEB), (PROHIBITED, "open")),
        (("0.0.0.0/0",), ("open", "open")),
        ((), (PROHIBITED, PROHIBITED)),
    ):
        await lab.fabric.set_policy(box.uid, EgressPolicy(allow_internet=False, allow_out=allowed))
        assert (await box.outcome(WEB), await box.outcome(OTHER_WEB)) == expected, allowed


async def test_one_sandbox_cannot_exhaust_connection_tracking(lab: Lab):
    await lab.fabric.close()
    await lab.open(max_flows=10)
    greedy, neighbour = await lab.sandbox(), await lab.sandbox()

    async def flow(number: int, seconds: float) -> str:
        # A fixed port each: a port that the kernel reused would be the same flow.
        return await udp_outcome(greedy.netns_fd, WEB, source_port=20_000 + number, seconds=seconds)

    allowed = [await flow(number, TIMEOUT) for number in range(10)]
    beyond = [await flow(number, 0.2) for number in range(10, 14)]

    assert allowed == ["open"] * 10
    assert "open" not in beyond
    assert await neighbour.outcome(WEB) == "open"
