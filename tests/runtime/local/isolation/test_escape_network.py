"""Escape attempts over the network, as root inside; all must fail.

The tests of policies in the firewall and the resolver are in `net`.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import subprocess

import pytest

from tests.runtime.local.inside import run, succeeds
from tests.runtime.local.nodes import eventually
from tests.security.battery.networks import CLOSED, CONFIGURE, TRY_TCP

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PYTHON = "/usr/bin/python3"

TRY_UDP = """
import socket, sys
port, *addresses = sys.argv[1:]
for address in addresses:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.socket(family, socket.SOCK_DGRAM).sendto(address.encode(), (address, int(port)))
    except OSError:
        pass
"""
SPOOF = """
import socket, sys
for level, option in ((0, 15), (0, 19), (41, 75)):  # freebind, transparent
    try:
        spoofed = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        spoofed.setsockopt(level, option, 1)
        spoofed.bind((sys.argv[1], 5353))
        spoofed.sendto(b"x", ("203.0.113.1", 53))
        print("sent")
    except OSError:
        pass
"""


async def python(instance, script: str, *arguments: str) -> str:
    outcome = await run(instance, f"{PYTHON} - {' '.join(arguments)} <<'END'\n{script}\nEND")
    assert outcome.status == 0, outcome
    return outcome.out


def own_addresses() -> list[str]:
    """Return every IPv4 and IPv6 address of this machine that needs no scope."""
    listed = subprocess.run(["ip", "-j", "address"], capture_output=True, check=True).stdout
    found = [entry["local"] for link in json.loads(listed) for entry in link["addr_info"]]
    return [one for one in found if not ipaddress.ip_address(one).is_link_local]


def is_answered(address: str, port: int) -> bool:
    """Connect to an address of this machine; `False` if it was removed meanwhile.

    A new address is listed a moment before it is reachable.
    """
    while address in own_addresses():
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), 5).close()
            return True
    return False


async def test_services_of_the_host_are_unreachable_on_all_its_addresses(shared_box):
    names = (await run(shared_box, "cat /etc/resolv.conf")).out
    gateway = names.split("nameserver ")[1].split()[0]
    addresses = sorted({gateway, "127.0.0.1", *own_addresses()})
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        addresses = [one for one in addresses if is_answered(one, port)]  # reachable from the host
        assert {gateway, "127.0.0.1"} <= set(addresses)
        assert await python(shared_box, TRY_TCP, str(port), *addresses, "::1") == ""
        mapped = [f"::ffff:{one}" for one in addresses if ":" not in one]
        assert await python(shared_box, TRY_TCP, str(port), *mapped) == ""


async def test_no_datagram_reaches_the_host(shared_box):
    names = (await run(shared_box, "cat /etc/resolv.conf")).out
    gateway = names.split("nameserver ")[1].split()[0]
    everybody = ["255.255.255.255", "224.0.0.1", "224.0.0.251", "ff02::1%eth0"]
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.settimeout(5)
        port = server.getsockname()[1]
        said = [gateway, *own_addresses(), *everybody]
        await python(shared_box, TRY_UDP, str(port), *said)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as witness:
            witness.sendto(b"the last word", ("127.0.0.1", port))
        # The port was used before: a late reply to its previous user is not from the sandbox.
        while (heard := server.recv(100)) != b"the last word":
            assert heard.decode(errors="replace") not in said


@pytest.mark.parametrize("addresses", CLOSED)
async def test_metadata_and_private_addresses_are_unreachable_in_every_notation(
    shared_box, addresses
):
    assert await python(shared_box, TRY_TCP, "80", *addresses.split()) == ""


async def test_sandboxes_cannot_reach_each_other(box):
    one, other = await box(), await box()
    script = 'import socket; s = socket.create_server(("0.0.0.0", 8080)); s.accept()'
    server = asyncio.ensure_future(run(one, f"{PYTHON} -c '{script}'", timeout=110))
    await eventually(lambda: succeeds(one, "ss -ltn 2>/dev/null | grep -q 8080 || "
                                      "grep -q ':1F90 ' /proc/net/tcp"))  # fmt: skip
    connect = f'import socket; socket.create_connection(("{one.address.ip}", 8080), 5)'
    assert not await succeeds(other, f"{PYTHON} -c '{connect}' 2>/dev/null")
    assert await succeeds(one, f"{PYTHON} -c '{connect}'")
    await server


async def test_packets_with_the_address_of_another_sandbox_are_dropped(box):
    one, other = await box(), await box()
    assert await python(one, SPOOF, other.address.ip) == ""


async def test_addresses_routes_and_links_cannot_be_changed(shared_box):
    assert await python(shared_box, CONFIGURE) == "-1\n-1\n-1\n"


async def test_abstract_sockets_of_the_host_cannot_be_reached(shared_box):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"paddock-test-{os.urandom(4).hex()}"
        listener.bind(f"\0{name}")
        listener.listen()
        script = f'import socket; socket.socket(socket.AF_UNIX).connect("\\0{name}")'
        assert not await succeeds(shared_box, f"{PYTHON} -c '{script}' 2>/dev/null")
