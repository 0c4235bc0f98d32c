"""Floods of connections: other clients are still served, and descriptors never run out."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from paddock.app.roles.gateway import build_limits
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.settings import Settings
from tests.gateway.rig import OK, SEED, Rig, get, read_request, rig
from tests.runtime.local.nodes import eventually

ATTACKER, CALLER = "127.0.0.2", "127.0.0.3"
SILENT = 5_000
LIMIT = 3_000
QUICK_SECONDS = 5.0
"""Far more than a response takes; far less than any timeout of the gateway."""
FLOOD = """
import resource, socket, sys, time
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
opened = [
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), source_address=("127.0.0.2", 0))
    for _ in range(int(sys.argv[2]))
]
print("open", flush=True)
time.sleep(600)
"""
API_CALL = (
    b"GET /sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: e2b_" + b"0" * 40 + b"\r\n\r\n"
)


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """Both ends of each connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def silence(paddock: Rig, count: int, address: str = ATTACKER) -> AsyncGenerator[None]:
    """Open connections that send nothing, and never close them."""
    opened: list[socket.socket] = []
    loop = asyncio.get_running_loop()

    async def open_one() -> None:
        made = socket.socket()
        opened.append(made)
        made.setblocking(False)
        made.bind((address, 0))
        await loop.sock_connect(made, ("127.0.0.1", paddock.port))

    try:
        for start in range(0, count, 200):
            await asyncio.gather(*(open_one() for _ in range(start, min(start + 200, count))))
        yield
    finally:
        for made in opened:
            made.close()


async def assert_served(paddock: Rig, address: str) -> None:
    """An API call and a request to a sandbox are answered quickly."""
    started = time.monotonic()
    assert (await paddock.request(API_CALL, address)).status == 200
    assert (await paddock.request(get(), address)).status == 200
    assert time.monotonic() - started < QUICK_SECONDS


@pytest.mark.parametrize(
    "limits",
    [
        GatewayLimits(connections=LIMIT),
        GatewayLimits(connections_per_address=LIMIT),
        GatewayLimits(connections=LIMIT, connections_per_address=0),
    ],
    ids=["both", "per address", "in total"],
)
async def test_a_flood_of_silent_connections_shuts_nobody_out(limits: GatewayLimits) -> None:
    async with rig(limits) as paddock:
        await paddock.upstream(OK)
        paddock.dialer.api_port = await paddock.listen(OK)
        waiting = await paddock.connect(CALLER)
        waiting.send(get())
        assert (await waiting.response()).status == 200
        async with silence(paddock, SILENT):
            await assert_served(paddock, CALLER)
            await assert_served(paddock, ATTACKER)
            # An idle connection of another client goes after all silent ones.
            waiting.send(get())
            assert (await waiting.response()).status == 200
            assert len(paddock.gateway.clients) <= LIMIT
            assert paddock.activity.closed["evicted"] >= SILENT - LIMIT
        await waiting.close()


async def test_connections_of_the_tls_front_and_of_trusted_proxies_are_not_one_client() -> None:
    limits = GatewayLimits(connections_per_address=10)
    async with (
        rig(limits, GatewayOptions(trusts_forwarded=True)) as paddock,
        silence(paddock, 50),
    ):
        await eventually(lambda: len(paddock.gateway.clients) == 50)
    async with rig(limits) as paddock:
        loop = asyncio.get_running_loop()
        front = await loop.create_server(
            lambda: ClientConnection(paddock.gateway, trusts_forwarded=True), "127.0.0.1", 0
        )
        paddock.port = front.sockets[0].getsockname()[1]
        async with silence(paddock, 50):
            await eventually(lambda: len(paddock.gateway.clients) == 50)
        front.close()


async def test_an_address_whose_connections_are_all_in_use_gets_a_503_and_others_are_served() -> (
    None
):
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.Event().wait()

    async with rig(GatewayLimits(connections_per_address=2)) as paddock:
        await paddock.upstream(never, port=9000)
        await paddock.upstream(OK)
        busy = [await paddock.connect(ATTACKER) for _ in range(2)]
        for wire in busy:
            wire.send(get(e2b_sandbox_port="9000"))
        traffic = paddock.activity.get_or_create("uid-abc", "abc")
        await eventually(lambda: traffic.in_flight == 2)
        refused = await paddock.request(get(), ATTACKER)
        assert refused.status == 503
        assert b"from this address" in refused.body
        assert refused.headers["retry-after"] == "1"
        assert (await paddock.request(get(), CALLER)).status == 200
        for wire in busy:
            await wire.close()


async def test_authenticated_callers_are_served_while_all_connections_are_in_use() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.Event().wait()

    async def api(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, headers, _ = await read_request(reader)
            status = b"200 OK" if headers["x-api-key"].endswith("0") else b"401 Unauthorized"
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\nok" % status)

    async with rig(GatewayLimits(connections=20, connections_reserved=2)) as paddock:
        await paddock.upstream(never, port=9000)
        await paddock.upstream(OK)
        await paddock.upstream(OK, port=49983)
        paddock.dialer.api_port = await paddock.listen(api)
        busy = [await paddock.connect(ATTACKER) for _ in range(20)]
        for wire in busy:
            wire.send(get(e2b_sandbox_port="9000"))
        traffic = paddock.activity.get_or_create("uid-abc", "abc")
        await eventually(lambda: traffic.in_flight == 20)
        token = {"e2b_sandbox_port": "49983", "x_access_token": SEED.access_token("abc")}
        assert (await paddock.request(get(), CALLER)).status == 503
        assert (await paddock.request(get(**token), CALLER)).status == 200
        assert (await paddock.request(API_CALL, CALLER)).status == 200
        wrong = await paddock.connect(CALLER)
        wrong.send(API_CALL.replace(b"000\r\n", b"001\r\n"))
        assert (await wrong.response()).status == 401
        assert await wrong.rest() == b"", "a wrong key does not keep a reserved connection"
        async with silence(paddock, 10):
            assert (await paddock.request(API_CALL, CALLER)).status == 200
        for wire in (*busy, wrong):
            await wire.close()


async def test_a_new_connection_that_sends_nothing_is_closed_soon() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        silent, idle = await paddock.connect(), await paddock.connect()
        idle.send(get())
        assert (await idle.response()).status == 200
        started = paddock.clock.monotonic()
        clients = paddock.gateway.clients
        clients._now = lambda: started + 14
        clients.sweep()
        assert len(clients) == 2
        clients._now = lambda: started + 16
        clients.sweep()
        assert await silent.rest() == b""
        assert paddock.activity.closed == {"silent": 1}
        idle.send(get())
        assert (await idle.response()).status == 200
        for wire in (silent, idle):
            await wire.close()


async def test_silent_connections_give_way_before_descriptors_run_out() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(taken_descriptors()) + 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    async with rig(GatewayLimits(descriptors=allowed)) as paddock:
        await paddock.upstream(OK)
        paddock.dialer.api_port = await paddock.listen(OK)
        flood = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FLOOD, str(paddock.port), "2000", stdout=subprocess.PIPE
        )  # fmt: skip
        assert flood.stdout is not None
        assert await flood.stdout.readline() == b"open\n"
        await eventually(lambda: paddock.activity.closed.get("evicted", 0) > 1_000)
        await assert_served(paddock, CALLER)
        flood.kill()
        await flood.wait()


async def test_accepting_does_not_spin_when_no_descriptor_is_left() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        clients = [socket.socket() for _ in range(20)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken_descriptors()) + 20, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            assert taken, "no descriptor was free before"
            for client in clients:
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(("127.0.0.1", paddock.port))
            before = time.process_time()
            await asyncio.sleep(1)
            assert time.process_time() - before < 0.5
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for client in clients:
                client.close()
        assert (await paddock.get()).status == 200


def taken_descriptors() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def test_limits_are_settings() -> None:
    limits = build_limits(
        Settings(max_connections=7, max_connections_per_address=3, first_byte_seconds=2)
    )
    assert (limits.connections, limits.connections_per_address) == (7, 3)
    assert limits.first_byte_seconds == 2
    assert limits.descriptors == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert build_limits(Settings()) == GatewayLimits(descriptors=limits.descriptors)
