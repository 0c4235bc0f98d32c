"""A server that speaks the protocol of code interpreters, on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Behaviour = Callable[["Run"], Awaitable[None]]


class Run:
    """One request for a run, and the stream that responds to it."""

    def __init__(self, request: web.Request, body: dict, stream: web.StreamResponse) -> None:
        self.request = request
        self.body = body
        self._stream = stream

    async def send(self, **event: object) -> None:
        await self.write(json.dumps(event).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    def cut(self) -> None:
        """Break the connection, as the gateway does when a sandbox ends."""
        assert self.request.transport is not None
        self.request.transport.abort()


async def end(run: Run) -> None:
    """Do nothing."""
    await run.send(type="end_of_execution")


class InterpreterServer:
    """Runs the same behaviour for each request, and records what was requested."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self.url = ""
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.disconnected = asyncio.Event()

    async def execute(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        stream = web.StreamResponse()
        await stream.prepare(request)
        try:
            await self._behaviour(Run(request, body, stream))
        except (asyncio.CancelledError, ConnectionResetError):
            self.disconnected.set()
            raise
        return stream


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    add_routes: Callable[[web.Application], None] = lambda _: None,
) -> AsyncIterator[str]:
    """Serve `POST /execute` and other routes; yield the URL."""
    app = web.Application()
    app.router.add_post("/execute", handler)
    add_routes(app)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def interpreter_server(behaviour: Behaviour) -> AsyncIterator[InterpreterServer]:
    """Serve a code interpreter with this behaviour."""
    server = InterpreterServer(behaviour)
    async with serving(server.execute) as server.url:
        yield server
