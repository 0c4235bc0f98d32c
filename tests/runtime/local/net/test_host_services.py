"""Ports of this machine and private networks that the operator opens for sandboxes."""

from collections.abc import AsyncIterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from paddock.runtime.local.net.settings import HOST_NAME
from paddock.runtime.port import EgressPolicy
from tests.runtime.local.net.lab import (
    CARRIER_WEB,
    CLOSED,
    HOST_LAN,
    HOST_PUBLIC,
    OPEN,
    PORT,
    PRIVATE_WEB,
    WEB,
    Lab,
    echo,
    running_lab,
    udp_outcome,
)

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

MIRROR = 8081
REFUSED = "ECONNREFUSED"


@pytest.fixture
async def lab(needs_root: None, tmp_path: Path) -> AsyncIterator[Lab]:
    opened = {"host_ports": (MIRROR,), "private_networks": (IPv4Network("10.50.0.0/24"),)}
    async with running_lab(tmp_path, **opened) as made:
        for port in (MIRROR, PORT):
            await made.echo_server(made.host, "0.0.0.0", port)
        yield made


def gateway(lab: Lab) -> str:
    return str(lab.fabric._state.plan.gateway)


async def test_only_named_ports_on_the_gateways_address_can_be_reached(lab: Lab):
    box = await lab.sandbox(OPEN)

    assert await box.outcome(gateway(lab), MIRROR) == "open"
    assert await box.outcome(gateway(lab), PORT) == REFUSED
    for other in (HOST_PUBLIC, HOST_LAN):
        assert await box.outcome(other, MIRROR) == REFUSED
    assert await udp_outcome(box.netns_fd, gateway(lab), MIRROR) != "open"


async def test_the_machine_has_a_name_only_if_ports_are_open(lab: Lab):
    box = await lab.sandbox(OPEN)
    found = await box.resolve(HOST_NAME)
    assert (found.code, found.addresses) == (0, [gateway(lab)])
    assert (await box.resolve(HOST_NAME, kind=28)).code == 0

    await lab.fabric.close()
    await lab.open()
    assert (await box.resolve(HOST_NAME)).code == 3
    assert await box.outcome(gateway(lab), MIRROR) == REFUSED
    assert await box.outcome(WEB) == "open"


async def test_a_closed_sandbox_reaches_the_mirror_only_if_its_policy_names_it(lab: Lab):
    closed = await lab.sandbox(CLOSED)
    by_address = await lab.sandbox(EgressPolicy(allow_internet=False, allow_out=(gateway(lab),)))
    by_name = await lab.sandbox(EgressPolicy(allow_internet=False, allow_out=(HOST_NAME,)))
    denied = await lab.sandbox(EgressPolicy(deny_out=(gateway(lab),)))

    assert await closed.outcome(gateway(lab), MIRROR) == REFUSED
    assert await denied.outcome(gateway(lab), MIRROR) == REFUSED
    assert await by_address.outcome(gateway(lab), MIRROR) == "open"
    assert await by_name.outcome(gateway(lab), MIRROR) == REFUSED  # not resolved yet
    assert (await by_name.resolve(HOST_NAME)).addresses == [gateway(lab)]
    assert await by_name.outcome(gateway(lab), MIRROR) == "open"
    assert await by_name.outcome(gateway(lab), PORT) == REFUSED
    assert await by_name.outcome(WEB) == REFUSED


async def test_a_changed_policy_ends_connections_to_the_mirror(lab: Lab):
    box = await lab.sandbox(OPEN)
    one = await box.connect(gateway(lab), MIRROR)
    with one:
        assert await echo(one) == b"hello"
        await lab.fabric.set_policy(box.uid, CLOSED)
        with pytest.raises(ConnectionResetError):
            await echo(one)


async def test_a_published_port_of_a_container_can_be_the_mirror(lab: Lab):
    """Container engines forward published ports by DNAT, to a private address."""
    lab.run(
        lab.host,
        "nft add table ip engine\n"
        "nft 'add chain ip engine pre { type nat hook prerouting priority dstnat; }'\n"
        f"nft add rule ip engine pre fib daddr type local tcp dport {MIRROR} "
        f"dnat to {CARRIER_WEB}:{PORT}",
    )
    box = await lab.sandbox(OPEN)

    assert await box.outcome(gateway(lab), MIRROR) == "open"
    assert await box.outcome(CARRIER_WEB) == REFUSED


async def test_an_opened_private_network_can_be_reached_and_no_other(lab: Lab):
    box = await lab.sandbox(OPEN)
    closed = await lab.sandbox(CLOSED)
    by_name = await lab.sandbox(EgressPolicy(allow_internet=False, allow_out=("proxy.corp",)))
    lab.names.addresses["proxy.corp"] = [PRIVATE_WEB, CARRIER_WEB]

    assert await box.outcome(PRIVATE_WEB) == "open"
    assert await box.outcome(CARRIER_WEB) == REFUSED
    assert await closed.outcome(PRIVATE_WEB) == REFUSED
    await by_name.resolve("proxy.corp")
    assert await by_name.outcome(PRIVATE_WEB) == "open"
    assert await by_name.outcome(CARRIER_WEB) == REFUSED
