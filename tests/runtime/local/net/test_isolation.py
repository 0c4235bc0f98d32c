"""Sandboxes reach neither each other nor services of their host."""

import asyncio
import socket

import pytest

from paddock.runtime.local.net import netns
from paddock.runtime.port import EgressPolicy
from tests.runtime.local.net.lab import (
    HOST_LAN,
    HOST_PUBLIC,
    HOST_SECOND,
    HOST_V6,
    OTHER_WEB,
    PORT,
    TIMEOUT,
    WEB,
    Lab,
    connect,
    echo,
    outcome,
    udp_outcome,
)

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

EVERYTHING = EgressPolicy(allow_private=True, allow_out=("0.0.0.0/0",))


async def test_sandboxes_cannot_reach_each_other_with_any_policy(lab: Lab):
    one, two = await lab.sandbox(EVERYTHING), await lab.sandbox(EVERYTHING)
    await lab.echo_server(two.netns_fd, "0.0.0.0")

    assert await one.outcome(two.ip) == "ECONNREFUSED"
    assert await udp_outcome(one.netns_fd, two.ip) != "open"
    assert await outcome(two.netns_fd, "127.0.0.1") == "open"  # The server is listening.


async def test_an_unused_address_is_unreachable(lab: Lab):
    box = await lab.sandbox(EVERYTHING)
    leaked: list[bytes] = []
    lab.run(
        lab.internet, "ip route add local 10.213.0.0/16 dev lo; ip addr add 10.213.7.7/32 dev lo"
    )
    await lab.datagrams(lab.internet, "10.213.7.7", 5, lambda _, data, sender: leaked.append(data))

    assert await box.outcome("10.213.7.7", seconds=2) != "open"
    assert await udp_outcome(box.netns_fd, "10.213.7.7", 5) != "open"
    assert leaked == []


@pytest.mark.parametrize("policy", [EgressPolicy(), EVERYTHING])
async def test_services_of_the_host_are_unreachable_on_every_address(
    lab: Lab, policy: EgressPolicy
):
    box = await lab.sandbox(policy)
    await lab.echo_server(lab.host, "0.0.0.0")
    await lab.echo_server(lab.host, "0.0.0.0", 53)
    addresses = [HOST_PUBLIC, HOST_LAN, HOST_SECOND, box.attachment.gateway]
    assert all([await outcome(lab.host, address) == "open" for address in addresses])

    for address in addresses:
        assert await box.outcome(address) == "ECONNREFUSED", address
        assert await udp_outcome(box.netns_fd, address) != "open", address
    for address in (HOST_PUBLIC, HOST_LAN, HOST_SECOND):
        assert await box.outcome(address, 53, seconds=2) != "open", address
    # A packet that arrives with the host's loopback as destination must not be accepted.
    lab.run(
        box.netns_fd,
        "sysctl -qw net.ipv4.conf.all.route_localnet=1; ip route flush table local\n"
        "ip route add 127.0.0.1 via 10.213.0.1 dev eth0",
    )
    assert await box.outcome("127.0.0.1", seconds=2) != "open"


async def test_published_ports_of_the_host_are_unreachable(lab: Lab):
    box = await lab.sandbox(EVERYTHING)
    lab.run(
        lab.host,
        "nft add table ip nat; nft 'add chain ip nat pre "
        "{ type nat hook prerouting priority dstnat; }'\n"
        f"nft add rule ip nat pre ip daddr {HOST_PUBLIC} tcp dport 81 dnat to {WEB}:{PORT}\n"
        f"nft add rule ip nat pre ip daddr 10.213.0.1 tcp dport 81 dnat to {WEB}:{PORT}",
    )

    assert await box.outcome(HOST_PUBLIC, 81) == "ECONNREFUSED"
    assert await box.outcome("10.213.0.1", 81) == "ECONNREFUSED"


async def test_ipv6_cannot_bypass_the_rules(lab: Lab):
    box = await lab.sandbox(EVERYTHING)
    await lab.echo_server(lab.host, "::")
    assert await outcome(lab.host, HOST_V6) == "open"
    assert "inet6" not in lab.run(box.netns_fd, "ip -6 addr show dev eth0")
    assert "inet6" not in lab.run(lab.host, f"ip -6 addr show dev {box.attachment.link}")

    # Not even with addresses and routes set inside the sandbox.
    lab.run(
        box.netns_fd,
        "ip -6 addr add 2001:db8:9::1/64 dev eth0 nodad\n"
        "ip -6 neigh add fe80::1 lladdr 02:70:00:00:00:01 dev eth0\n"
        "ip -6 route add default via fe80::1 dev eth0",
    )
    assert await box.outcome(HOST_V6, seconds=2) == "timeout"


async def test_spoofed_packets_are_dropped(lab: Lab):
    box, neighbour = await lab.sandbox(), await lab.sandbox()
    seen: list[bytes] = []
    await lab.datagrams(lab.internet, WEB, 9999, lambda _, data, sender: seen.append(data))
    for source in (neighbour.ip, "10.213.99.99", HOST_PUBLIC, "8.8.8.8"):
        lab.run(box.netns_fd, f"ip addr add {source}/32 dev eth0")
        assert await udp_outcome(box.netns_fd, WEB, source=source) == "timeout", source
        await udp_outcome(box.netns_fd, WEB, 9999, source=source)
        assert (
            await udp_outcome(box.netns_fd, box.attachment.gateway, 53, source=source) == "timeout"
        )

    assert seen == []
    assert await neighbour.outcome(WEB) == "open"
    assert await udp_outcome(box.netns_fd, WEB, source=box.ip, seconds=TIMEOUT) == "open"


async def test_other_machines_can_neither_spoof_nor_reach_a_sandbox(lab: Lab):
    box = await lab.sandbox(EVERYTHING)
    await lab.echo_server(box.netns_fd, "0.0.0.0")
    lab.run(lab.internet, "ip route add 10.213.0.0/16 via 203.0.113.2")

    assert await outcome(lab.internet, box.ip, seconds=2) != "open"
    assert await udp_outcome(lab.internet, box.ip) != "open"
    lab.run(lab.internet, f"ip addr add {box.ip}/32 dev lo")
    with pytest.raises((OSError, TimeoutError)):
        (await connect(lab.internet, HOST_PUBLIC, 22, seconds=2)).close()


async def test_the_host_can_reach_a_sandbox(lab: Lab):
    box = await lab.sandbox(EgressPolicy(allow_internet=False))
    await lab.echo_server(box.netns_fd, "0.0.0.0")

    assert await outcome(lab.host, box.ip) == "open"


async def test_flows_of_a_former_owner_of_an_address_are_dropped(lab: Lab):
    first = await lab.sandbox()
    source = await lab.datagrams(
        lab.internet, WEB, 7000, lambda back, data, sender: back.sendto(data, sender)
    )
    with netns.socket_in(first.netns_fd, socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setblocking(False)
        one.bind(("0.0.0.0", 4444))
        one.connect((WEB, 7000))
        assert await echo(one) == b"hello"
    slot = first.attachment.slot
    await lab.fabric.detach(first.uid)

    second = netns.create()
    lab.stack.callback(lambda: __import__("os").close(second))
    await lab.fabric.attach("second", second, slot)
    with netns.socket_in(second, socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setblocking(False)
        one.bind(("0.0.0.0", 4444))
        source.sendto(b"secret", (HOST_PUBLIC, 4444))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.get_running_loop().sock_recv(one, 100)
    assert await outcome(second, OTHER_WEB) == "open"
