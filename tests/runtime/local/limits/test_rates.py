"""Network bandwidth and disk I/O of a sandbox stay within its limits, in every state."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.runtime.port import Blueprint, Instance, Limits
from tests.ports import free_port
from tests.runtime.local.inside import run
from tests.runtime.local.nodes import TestNode, wait_for_warm

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

RATE = 1_000_000
"""Bytes per second."""
SLOW = Limits(ingress_bandwidth=8 * RATE, egress_bandwidth=8 * RATE)
SECONDS = 1.5
CLIENT = """
import socket, sys, time
way, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
link = socket.create_connection(("host.paddock.internal", port))
link.sendall(way.encode())
data = bytes(65536)
if way == "d":
    link.recv(1)
    end, count = time.monotonic() + seconds, 0
    while (left := end - time.monotonic()) > 0:
        link.settimeout(left)
        try:
            count += len(link.recv(65536))
        except TimeoutError:
            break
    print(count / seconds)
else:
    try:
        while True:
            link.sendall(data)
    except OSError:
        pass
"""


class RateServer:
    """Sends, or counts what it receives, for a while."""

    def __init__(self) -> None:
        self.port = free_port()
        self.received: asyncio.Queue[float] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        way = await reader.readexactly(1)
        with contextlib.suppress(OSError):
            if way == b"d":
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
            await reader.readexactly(1)
            end, count = time.monotonic() + SECONDS, 0
            while (left := end - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        count += len(await reader.read(65536))
            self.received.put_nowait(count / SECONDS)
            writer.transport.abort()


@pytest.fixture
async def server() -> AsyncIterator[RateServer]:
    made = RateServer()
    async with await asyncio.start_server(made.serve, "0.0.0.0", made.port):
        yield made


@pytest.fixture
async def open_node(server: RateServer, tmp_path: Path) -> AsyncIterator[TestNode]:
    """A node without limits of its own, whose sandboxes reach the server."""
    outbound = tmp_path / "outbound.json"
    outbound.write_text(json.dumps({"host_ports": [server.port]}))
    made = TestNode("--outbound", str(outbound), "--rates", "{}")
    await made.start()
    yield made
    for instance in await made.runtime.instances():
        await made.runtime.destroy(instance.uid)
    await made.stop()


async def measure(instance: Instance, server: RateServer) -> tuple[float, float]:
    """Return the bytes per second to and from a sandbox."""
    await run(instance, f"cat > /tmp/client.py <<'X'\n{CLIENT}\nX")
    down = await run(instance, f"python3 /tmp/client.py d {server.port} {SECONDS}")
    assert down.status == 0, down
    up = asyncio.create_task(run(instance, f"python3 /tmp/client.py u {server.port} {SECONDS}"))
    rate = await asyncio.wait_for(server.received.get(), 30)
    await up
    return float(down.out), rate


def is_limited(rates: tuple[float, float], expected: float = RATE) -> bool:
    assert all(0.7 * expected < rate < 1.3 * expected for rate in rates), rates
    return True


async def test_bandwidth_is_limited_in_both_directions_in_every_state(open_node, server):
    runtime = open_node.runtime
    free = await runtime.create(Blueprint(uid="free", image="host"))
    unlimited = await measure(free, server)
    assert min(unlimited) > 10 * RATE, unlimited
    slow = await runtime.create(Blueprint(uid="slow", image="host", limits=SLOW))
    assert is_limited(await measure(slow, server))
    # Root inside cannot change it.
    for change in ("del dev eth0 root", "replace dev eth0 root pfifo", "add dev lo root pfifo"):
        assert (await run(slow, f"tc qdisc {change}")).status != 0
    await runtime.hibernate("slow")
    slow = await runtime.restore("slow")
    assert is_limited(await measure(slow, server))
    (fork,) = await runtime.fork("slow", (Blueprint(uid="fork", image="host", limits=SLOW),))
    assert isinstance(fork, Instance), fork
    assert is_limited(await measure(fork, server))
    open_node.kill()
    await open_node.start()
    assert is_limited(await measure(slow, server))


async def test_a_warm_sandbox_gets_the_bandwidth_of_its_claim(open_node, server):
    runtime = open_node.runtime
    for uid, limits, expected in (("slow", SLOW, RATE), ("free", Limits(), 0)):
        await wait_for_warm(open_node)
        made = await runtime.create(Blueprint(uid=uid, image="host", limits=limits))
        rates = await measure(made, server)
        assert is_limited(rates) if expected else min(rates) > 10 * RATE
        # The next warm sandboxes have the limits of this one.


async def test_the_rates_of_the_node_are_a_ceiling(server, tmp_path):
    outbound = tmp_path / "outbound.json"
    outbound.write_text(json.dumps({"host_ports": [server.port]}))
    rates = {"ingress_bandwidth": 8 * RATE, "egress_bandwidth": 8 * RATE}
    own = TestNode("--outbound", str(outbound), "--rates", json.dumps(rates))
    await own.start()
    try:
        for uid, limits in (("greedy", Limits(ingress_bandwidth=10**12)), ("zero", Limits(
            ingress_bandwidth=0, egress_bandwidth=0))):  # fmt: skip
            made = await own.runtime.create(Blueprint(uid=uid, image="host", limits=limits))
            assert is_limited(await measure(made, server))
            await own.runtime.destroy(uid)
    finally:
        await own.stop()


READ = """
import mmap, os, time
data = mmap.mmap(-1, 1 << 18)
file = os.open("/root/data", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
os.ftruncate(file, 8 << 20)
def rate(call, seconds=1.5):
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        count += call(file, [data], count % (8 << 20))
    return count / (time.monotonic() - began)
for at in range(0, 8 << 20, 1 << 18):
    os.pwritev(file, [data], at)
print(rate(os.pwritev), rate(os.preadv))
"""


async def disk_rates(instance: Instance) -> tuple[float, float]:
    outcome = await run(instance, f"python3 -c '{READ}'", timeout=120)
    assert outcome.status == 0, outcome
    written, read = outcome.out.split()
    return float(written), float(read)


async def test_direct_io_is_limited_in_every_state(open_node):
    runtime, mega = open_node.runtime, 4 << 20
    slow = Limits(io_read_bandwidth=mega, io_write_bandwidth=mega)
    free = await runtime.create(Blueprint(uid="free", image="host"))
    assert min(await disk_rates(free)) > 3 * mega
    made = await runtime.create(Blueprint(uid="slow", image="host", limits=slow))
    assert is_limited(await disk_rates(made), mega)
    await runtime.hibernate("slow")
    assert is_limited(await disk_rates(await runtime.restore("slow")), mega)
    (fork,) = await runtime.fork("slow", (Blueprint(uid="fork", image="host", limits=slow),))
    assert isinstance(fork, Instance), fork
    assert is_limited(await disk_rates(fork), mega)
