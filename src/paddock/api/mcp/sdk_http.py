"""Speaks MCP over HTTP with the official package, one request at a time and without sessions.

Versions of the protocol without sessions are refused: clients then use the newest one with them,
which lets calls share a sandbox without naming it.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import (
    DEFAULT_MAX_REQUEST_BODY_SIZE,
    TransportSecuritySettings,
)
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paddock.api.bodies import read_limited
from paddock.api.mcp.call_slots import CallSlots
from paddock.api.mcp.cancellation import RunningRequests, read_head, replayed
from paddock.api.mcp.http import CLIENT, McpClient
from paddock.api.mcp.server import USER_AGENT, build_server
from paddock.api.mcp.session import McpSession, SessionMemories
from paddock.api.mcp.tool_types import Ctx
from paddock.client.sandboxes import ClientAddresses, HttpSandboxes
from paddock.run_code.http import sandbox_session

_VERSION = "mcp-protocol-version"


class SdkProtocol:
    """Implements `McpProtocol`."""

    def __init__(self, *, api: str, gateway: str, template: str) -> None:
        """`api` and `gateway`: URLs at which this process reaches them."""
        self._api = api
        self._gateway = gateway
        self._template = template
        self._memories = SessionMemories()
        self._running = RunningRequests()
        self._slots = CallSlots()
        self._http: aiohttp.ClientSession | None = None
        server = build_server(self._session_of)
        # The page and the host were checked before.
        unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        server.streamable_http_app(stateless_http=True, transport_security=unchecked)
        self._manager: StreamableHTTPSessionManager = server.session_manager

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Serve while entered."""
        async with sandbox_session() as http, self._manager.run():
            self._http = http
            yield

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        version = Headers(scope=scope).get(_VERSION)
        if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await _unsupported(version)(scope, receive, send)
            return
        client: McpClient = scope[CLIENT]
        body = await read_limited(Request(scope, receive), DEFAULT_MAX_REQUEST_BODY_SIZE)
        head = read_head(body)
        self._running.cancel(client, head)
        async with self._running.cancellable(client, head, send) as cancellable_send:
            await self._manager.handle_request(scope, replayed(body, receive), cancellable_send)

    async def end_session(self, client: McpClient) -> None:
        """Pause the sandbox of a session."""
        await self._session(client).end()

    def _session_of(self, ctx: Ctx) -> McpSession:
        request: Request = ctx.request_context.request  # pyright: ignore[reportAssignmentType]
        return self._session(request.scope[CLIENT])

    def _session(self, client: McpClient) -> McpSession:
        assert self._http is not None  # noqa: S101 - requests are served while `run` is entered
        headers = {"X-API-Key": client.key, "User-Agent": USER_AGENT}
        if client.address is not None:
            headers["X-Real-IP"] = client.address
        addresses = ClientAddresses(self._api, self._gateway, client.public_url)
        return McpSession(
            HttpSandboxes(self._http, addresses, headers),
            client.session_id,
            self._memories.of(client.key_id, client.session_id),
            template=self._template,
            slot=lambda: self._slots.taken(client.key_id),
        )


def _unsupported(version: str) -> Response:
    error = {
        "code": UNSUPPORTED_PROTOCOL_VERSION,
        "message": "this version of the protocol is not supported",
        "data": {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version},
    }
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": error})
    return Response(body, 400, media_type="application/json")
