"""Parts of the gateway benchmark that run in their own processes.

python bench/gateway_parts.py serve PORT ADMIN_PORT UPSTREAM_PORT   one gateway, 10,000 routes
python bench/gateway_parts.py sockets PORT                          an upstream of WebSockets
python bench/gateway_parts.py load PORT RATE SECONDS HEADERS        latencies at a fixed rate
"""

import asyncio
import gc
import json
import resource
import sys
import time
from collections import deque
from typing import cast

import uvloop

from paddock.adapters.gateway import admin_server
from paddock.cache.states import SandboxState
from paddock.gateway.activity import Activity
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.http.sender import Sender
from paddock.gateway.http.upstream import UpstreamConnection
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.gateway.routing.peers import MessageVerifier, PeerEndpoint
from paddock.gateway.routing.route_lookup import RouteLookup
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.gateway.service import Gateway
from paddock.gateway.signing import Signatures
from paddock.gateway.waking.waker import Waker
from paddock.kit import clock as clocks
from paddock.kit import metrics
from paddock.kit.errors import NotFoundError
from paddock.resources.meta import Key
from paddock.resources.tokens import TokenSeed, hashed

SEED = TokenSeed(b"bench")
ROUTES = 10_000


def sandbox_id(number: int) -> str:
    return f"sandbox{number:08d}"


def route(number: int, version: int = 1) -> Route:
    name = sandbox_id(number)
    return Route(
        id=name,
        key=Key("default", name),
        uid=f"uid-{name}",
        version=version,
        state=SandboxState.RUNNING,
        access_token_hash=hashed(SEED.access_token(name)),
    )


class LoopbackDialer:
    def __init__(self, port: int) -> None:
        self._port = port

    async def dial(
        self, route: Route, port: int, protocol: UpstreamConnection
    ) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        # WebSockets of the memory figure go to their own upstream, named by the sandbox's port.
        target = self._port if port == 49983 else port
        await loop.create_connection(lambda: protocol, "127.0.0.1", target)
        return protocol

    async def dial_api(self, protocol: UpstreamConnection) -> UpstreamConnection:
        raise ConnectionRefusedError


async def unknown(_: object) -> Route:
    raise NotFoundError("no")


async def serve(port: int, admin_port: int, upstream_port: int) -> None:
    clock = clocks.system()
    routes, activity = RouteTable(clock), Activity()
    for number in range(ROUTES):
        routes.put(route(number))
    routes.is_ready = True
    metrics.REGISTRY.register(activity)
    limits, options = GatewayLimits(), GatewayOptions()
    async with asyncio.TaskGroup() as tasks:
        gateway = Gateway(
            routes=routes,
            waker=Waker(routes, unknown, tasks, activity, timeout_seconds=60),
            lookup=RouteLookup(routes, unknown, clock, tasks),
            sender=Sender(
                LoopbackDialer(upstream_port), routes, clock, limits=limits, options=options
            ),
            signatures=Signatures(routes, SEED, clock),
            activity=activity,
            clock=clock,
            tasks=tasks,
            limits=limits,
            options=options,
        )
        endpoint = PeerEndpoint(routes, MessageVerifier(SEED, clock))
        app = admin_server.create_app(routes, activity, endpoint, clock)
        async with admin_server.serving(app, "127.0.0.1", admin_port):
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                lambda: ClientConnection(gateway), "127.0.0.1", port, backlog=4096
            )
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 100)
            await server.serve_forever()


class Socket(asyncio.Protocol):
    """Switches protocols, then echoes."""

    def __init__(self) -> None:
        self._has_switched = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if self._has_switched:
            self._transport.write(data)
        elif data.endswith(b"\r\n\r\n"):
            self._has_switched = True
            self._transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\n\r\n"
            )


async def sockets(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Socket, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


class Caller(asyncio.Protocol):
    """One connection of the load: sends requests on schedule and records latencies.

    A request that is due while an answer is pending is sent afterwards; its time counts from when
    it was due.
    """

    def __init__(self, request: bytes, samples: list[float]) -> None:
        self._request = request
        self._samples = samples
        self._buffer = b""
        self._told: deque[float] = deque()
        self.failed = 0

    @property
    def left(self) -> int:
        return len(self._told)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def ask(self) -> None:
        self._told.append(time.perf_counter())
        if len(self._told) == 1:
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if end and len(body) >= 2:
            told = self._told.popleft()
            if head.startswith(b"HTTP/1.1 200"):
                self._samples.append(time.perf_counter() - told)
            else:
                self.failed += 1
            self._buffer = b""
            if self._told:
                self._transport.write(self._request)


async def load(port: int, rate: float, seconds: float, request: bytes) -> tuple[list[float], int]:
    """Send requests over 64 connections at this rate; return latencies and failures."""
    gc.disable()  # Its pauses would be counted as latency of the server.
    loop = asyncio.get_running_loop()
    samples: list[float] = []
    callers: list[Caller] = []
    for _ in range(64):
        _, caller = await loop.create_connection(
            lambda: Caller(request, samples), "127.0.0.1", port
        )
        callers.append(caller)
    started = loop.time()
    asked = 0
    while (now := loop.time()) - started < seconds:
        due = int((now - started) * rate)
        while asked < due:
            callers[asked % len(callers)].ask()
            asked += 1
        await asyncio.sleep(0.0005)
    await asyncio.sleep(0.2)
    failed = sum(caller.failed + caller.left for caller in callers)
    return samples[len(samples) // 10 :], failed


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    match sys.argv[1:]:
        case ["serve", port, admin_port, upstream_port]:
            uvloop.run(serve(int(port), int(admin_port), int(upstream_port)))
        case ["sockets", port]:
            uvloop.run(sockets(int(port)))
        case ["load", port, rate, seconds, request]:
            samples, failed = uvloop.run(
                load(int(port), float(rate), float(seconds), request.encode("latin-1"))
            )
            print(json.dumps({"samples": samples, "failed": failed}))


if __name__ == "__main__":
    main()
