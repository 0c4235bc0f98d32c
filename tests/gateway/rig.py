"""A gateway on a real loopback socket, with tiny upstream servers for sandboxes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.gateway.activity import Activity
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.http.sender import Sender
from paddock.gateway.http.upstream import UpstreamConnection
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.gateway.routing.hops import GatewayHops
from paddock.gateway.routing.route_lookup import RouteLookup
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.gateway.service import Gateway
from paddock.gateway.signing import Signatures
from paddock.gateway.waking.waker import Waker
from paddock.kit import clock as clocks
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.resources.meta import Key
from paddock.resources.tokens import TokenSeed, hashed

SEED = TokenSeed(b"seed")
SECRETS = ("token-of-the-api", "first-key")
"""Credentials of the APIs that are not recognisable by their form."""
PATIENCE_SECONDS = 60.0
"""A timeout for operations that are immediate unless the machine stalls."""
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def route(sandbox_id: str = "abc", **changes: Any) -> Route:
    """A running sandbox's route."""
    made = Route(
        id=sandbox_id,
        key=Key("default", sandbox_id),
        uid=f"uid-{sandbox_id}",
        version=1,
        state=SandboxState.RUNNING,
        access_token_hash=hashed(SEED.access_token(sandbox_id)),
    )
    return structs.replace(made, **changes)


class LoopbackDialer:
    """Maps every port of every sandbox to a loopback port."""

    def __init__(self) -> None:
        self.targets: dict[tuple[str, int], int] = {}
        self.dials = 0
        self.api_port: int | None = None

    async def dial(
        self, route: Route, port: int, protocol: UpstreamConnection
    ) -> UpstreamConnection:
        self.dials += 1
        target = self.targets.get((route.id, port))
        if target is None:
            raise ConnectionRefusedError
        return await self._connect(target, protocol)

    async def dial_api(self, protocol: UpstreamConnection) -> UpstreamConnection:
        if self.api_port is None:
            raise ConnectionRefusedError
        return await self._connect(self.api_port, protocol)

    @staticmethod
    async def _connect(port: int, protocol: UpstreamConnection) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: protocol, "127.0.0.1", port)
        return protocol


class Rig:
    """One gateway, its route table, and a fake control plane."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        limits: GatewayLimits,
        options: GatewayOptions,
        wake_seconds: float,
    ) -> None:
        self.clock = clocks.system()
        self.routes = RouteTable(self.clock)
        self.routes.is_ready = True
        self.dialer = LoopbackDialer()
        self.activity = Activity()
        self.wakes: list[str] = []
        self.lookups: list[str] = []
        self.elsewhere: dict[str, Route] = {}
        """Routes of the control plane that the table lacks."""
        self.absences: list[PaddockError] = []
        """Errors that the next lookups raise."""
        self.on_resume: Callable[[Route], Awaitable[Route]] = self._resume
        self.on_fetch: Callable[[str], Awaitable[Route]] = self._fetch
        self.gateway = Gateway(
            routes=self.routes,
            waker=Waker(
                self.routes,
                lambda route: self.on_resume(route),
                tasks,
                self.activity,
                timeout_seconds=wake_seconds,
            ),
            lookup=RouteLookup(self.routes, lambda name: self.on_fetch(name), self.clock, tasks),
            sender=Sender(
                self.dialer,
                self.routes,
                self.clock,
                limits=limits,
                options=options,
                hops=GatewayHops(SEED),
            ),
            signatures=Signatures(self.routes, SEED, self.clock),
            activity=self.activity,
            clock=self.clock,
            tasks=tasks,
            limits=limits,
            options=options,
            secrets=SECRETS,
        )
        self._stack = contextlib.AsyncExitStack()
        self._handlers: set[asyncio.Task[None]] = set()
        self.port = 0

    async def _resume(self, asleep: Route) -> Route:
        self.wakes.append(asleep.id)
        await asyncio.sleep(0.05)
        current = self.routes.get(asleep.id) or asleep
        return structs.replace(current, state=SandboxState.RUNNING, version=current.version + 1)

    async def _fetch(self, sandbox_id: str) -> Route:
        self.lookups.append(sandbox_id)
        if self.absences:
            raise self.absences.pop()
        if sandbox_id not in self.elsewhere:
            raise NotFoundError("no")
        return self.elsewhere[sandbox_id]

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: ClientConnection(self.gateway), "127.0.0.1", 0, backlog=512
        )
        self.port = server.sockets[0].getsockname()[1]
        self._stack.callback(server.close)

    async def close(self) -> None:
        self.gateway.clients.close()
        self.gateway._sender._pool.close_older(-1)
        handlers = tuple(self._handlers)
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await self._stack.aclose()
        # Closing takes effect on the next iterations of the loop.
        for _ in range(3):
            await asyncio.sleep(0)

    async def upstream(
        self, serve: Serve, sandbox_id: str = "abc", port: int = 8000, **changes: Any
    ) -> None:
        """Start a server for a port of a sandbox."""
        self.dialer.targets[sandbox_id, port] = await self.listen(serve)
        if self.routes.get(sandbox_id) is None:
            assert self.routes.put(route(sandbox_id, **changes))

    async def listen(self, serve: Serve) -> int:
        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._handlers.add(task)
            try:
                await serve(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                self._handlers.discard(task)
                writer.close()

        server = await asyncio.start_server(guarded, "127.0.0.1", 0, limit=2**22)
        self._stack.push_async_callback(server.wait_closed)
        self._stack.callback(server.close)
        return server.sockets[0].getsockname()[1]

    def change(self, sandbox_id: str = "abc", **changes: Any) -> Route:
        """Change a route, as the informer does."""
        known = self.routes._by_key[Key("default", sandbox_id)]
        made = structs.replace(known, version=known.version + 1, **changes)
        assert self.routes.put(made)
        return made

    async def connect(self, address: str = "127.0.0.1") -> "Wire":
        """Connect, as a client of this address."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=2**22, local_addr=(address, 0)
        )
        return Wire(reader, writer)

    async def request(self, request: bytes, address: str = "127.0.0.1") -> "Response":
        """Send one request on a new connection and read one response."""
        wire = await self.connect(address)
        try:
            wire.send(request)
            return await wire.response(head_only=request.startswith(b"HEAD"))
        finally:
            await wire.close()

    async def get(self, path: str = "/", **headers: str) -> "Response":
        return await self.request(get(path, **headers))


@contextlib.asynccontextmanager
async def rig(
    limits: GatewayLimits | None = None,
    options: GatewayOptions | None = None,
    *,
    wake_seconds: float = PATIENCE_SECONDS,
) -> AsyncGenerator[Rig]:
    limits = structs.replace(limits or GatewayLimits(), connect_seconds=PATIENCE_SECONDS)
    async with asyncio.TaskGroup() as tasks:
        made = Rig(tasks, limits, options or GatewayOptions(), wake_seconds)
        await made.open()
        try:
            yield made
        finally:
            await made.close()


class Response:
    """One parsed response."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, raw: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.raw = raw


class Wire:
    """A raw client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str], bytes]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
        first, *lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        return int(first.split()[1]), headers, raw

    async def response(self, *, head_only: bool = False) -> Response:
        status, headers, raw = await self.head()
        body = b""
        if head_only or status in (204, 304) or status < 200:
            pass
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body, trailers = await self.chunks()
            headers |= trailers
        else:
            body = await self.reader.read()
        return Response(status, headers, body, raw)

    async def chunks(self) -> tuple[bytes, dict[str, str]]:
        body = b""
        while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        trailers = {}
        while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.decode().partition(":")
            trailers[name.lower()] = value.strip()
        return body, trailers

    async def rest(self) -> bytes:
        """Return everything until end-of-file; raises `ConnectionResetError` on a reset."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_SECONDS)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        """Reset the connection."""
        opened = self.writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()


def get(path: str = "/", *, method: str = "GET", **headers: str) -> bytes:
    """A plain request to port 8000 of `abc`, unless headers say otherwise."""
    given = {"host": "localhost", "e2b-sandbox-id": "abc", "e2b-sandbox-port": "8000"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


async def read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """Read a request as a simple upstream does: request line, headers, body."""
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        body, trailers = await Wire(reader, None).chunks()  # type: ignore[arg-type]
        headers |= {f"trailer-{name}": value for name, value in trailers.items()}
    return first, headers, body


def replying(response: bytes) -> Serve:
    """An upstream that sends the same response to every request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(response)
            await writer.drain()

    return serve


def recording(seen: list[tuple[str, dict[str, str], bytes]], body: bytes = b"ok") -> Serve:
    """An upstream that records its requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()

    return serve


OK = replying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
