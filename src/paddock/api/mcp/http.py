"""`/mcp`: the tools over HTTP, with an API key.

This module checks the page, the key and the session; `sdk_http` speaks the protocol. A request is
served without state of its process, so that sessions outlive restarts: the session is named by its
header, and its sandbox by the store.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol
from uuid import uuid4

import msgspec
from msgspec import Struct
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paddock.api.audit.notes import CALLER, notes_of
from paddock.api.errors import retry_after, status_of
from paddock.api.login_limits import CLIENT_HEADER, LoginLimits, limited_address
from paddock.api.mcp.origins import PageOrigins
from paddock.claims.caller import Caller
from paddock.kit import bearer
from paddock.kit.errors import PaddockError, TooLargeError, UnavailableError
from paddock.kit.logs import fields
from paddock.manager.keys import Keyring

log = logging.getLogger(__name__)

PATH = "/mcp"
SESSION_HEADER = "mcp-session-id"
CLIENT = "paddock.mcp"
"""Key in an ASGI scope: the `McpClient` of the request."""
_SESSION = re.compile(r"^[0-9a-f]{32}$")
_START_SECONDS = 30.0


class McpClient(Struct, frozen=True):
    """Who sent a request, and for which session."""

    key: str
    key_id: str
    session_id: str
    address: str | None
    """The address that its calls count for; None: a process of this machine."""
    public_url: str
    """The gateways as the client reaches them."""


class McpProtocol(Protocol):
    """Speaks the protocol, for requests that were accepted."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """Serve while entered."""
        ...

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        ...

    async def end_session(self, client: McpClient) -> None:
        """Pause the sandbox of a session."""
        ...


class McpApplication:
    """The application at `/mcp`."""

    def __init__(
        self,
        load: Callable[[], McpProtocol],
        keyring: Keyring,
        logins: LoginLimits,
        origins: PageOrigins,
    ) -> None:
        """`load` imports the protocol; `UnsupportedError` if it cannot be served here."""
        self._load = load
        self._keyring = keyring
        self._logins = logins
        self._origins = origins
        self._wanted = asyncio.Event()
        self._protocol: asyncio.Future[McpProtocol] | None = None
        """The protocol once it is loaded."""

    async def run(self) -> None:
        """Load the protocol when the first client comes: it takes memory. Serve until cancelled."""
        loaded = self._future()
        await self._wanted.wait()
        try:
            protocol = await asyncio.to_thread(self._load)
            async with protocol.run():
                loaded.set_result(protocol)
                await asyncio.Event().wait()
        except PaddockError as error:
            self._fail(error)
        except Exception as error:
            # The rest of the control plane does not need MCP.
            log.exception("MCP cannot be served")
            self._fail(UnavailableError(f"MCP cannot be served: {error!r}"))
        finally:
            if self._protocol is loaded and loaded.done() and loaded.exception() is None:
                self._protocol = None
        await asyncio.Event().wait()

    def _fail(self, error: PaddockError) -> None:
        """Answer all clients with an error."""
        loaded = self._future()
        if loaded.done():
            loaded = self._protocol = asyncio.get_running_loop().create_future()
        loaded.set_exception(error)
        loaded.exception()  # Retrieved, also if no client comes.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        if (refusal := self._origins.refusal(request.headers)) is not None:
            await _error(403, refusal)(scope, receive, send)
            return
        try:
            client = self._client(request)
            protocol = await self._loaded()
        except PaddockError as error:
            notes_of(scope).fail(error)
            await _failure(error)(scope, receive, send)
            return
        answer = await _answer(request, client, protocol)
        if answer is not None:
            await answer(scope, receive, send)
            return
        scope[CLIENT] = client
        try:
            await protocol.handle(scope, receive, _with_session(send, client))
        except TooLargeError as error:
            await _failure(error)(scope, receive, send)
        except ClientDisconnect:
            return

    async def _loaded(self) -> McpProtocol:
        self._wanted.set()
        try:
            async with asyncio.timeout(_START_SECONDS):
                return await asyncio.shield(self._future())
        except TimeoutError as error:
            raise UnavailableError("MCP is starting", retry_after_seconds=1) from error

    def _future(self) -> asyncio.Future[McpProtocol]:
        if self._protocol is None:
            self._protocol = asyncio.get_running_loop().create_future()
        return self._protocol

    def _client(self, request: Request) -> McpClient:
        """Return the authenticated client."""
        key = _key_of(request)
        caller = self._authenticate(request, key)
        request.scope[CALLER] = caller
        counted = limited_address(request)
        self._logins.calls.take(counted, caller.key_id)
        peer = request.client.host if request.client else None
        address = request.headers.get(CLIENT_HEADER) or peer
        scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
        return McpClient(
            key=key or "",
            key_id=caller.key_id,
            session_id=request.headers.get(SESSION_HEADER, ""),
            address=address if counted is not None else None,
            public_url=f"{scheme}://{request.headers.get('host', 'localhost')}",
        )

    def _authenticate(self, request: Request, key: str | None) -> Caller:
        if not key:
            return self._keyring.authenticate(None)
        return self._logins.check(request, key, lambda: self._keyring.authenticate(key))


async def _answer(request: Request, client: McpClient, protocol: McpProtocol) -> Response | None:
    """Return the response that does not need the protocol, or None."""
    if client.session_id and not _SESSION.match(client.session_id):
        return _error(404, "Session not found")
    if request.method == "DELETE":
        return await _end(client, protocol)
    if request.method != "POST":
        # The server starts no messages of its own, so there is no stream to open.
        return _error(405, "use POST", {"Allow": "POST, DELETE"})
    return None


async def _end(client: McpClient, protocol: McpProtocol) -> Response:
    """End a session: its sandbox pauses."""
    if not client.session_id:
        return _error(400, f"{SESSION_HEADER} is missing")
    try:
        await protocol.end_session(client)
    except (PaddockError, TimeoutError) as error:
        # It pauses at its timeout.
        log.warning("sandbox was not paused", extra=fields(error=str(error)))
    return Response(status_code=204)


def _key_of(request: Request) -> str | None:
    key = request.headers.get("x-api-key")
    return key or bearer.token_of(request.headers.get("authorization", ""))


def _with_session(send: Send, client: McpClient) -> Callable[[Message], Awaitable[None]]:
    """Return `send`, which gives a client without a session the id of a new one."""
    if client.session_id:
        return send

    async def send_id(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            # Clients keep the id that comes with the response to `initialize`.
            MutableHeaders(scope=message)[SESSION_HEADER] = uuid4().hex
        await send(message)

    return send_id


def _failure(error: PaddockError) -> Response:
    status = status_of(error)
    headers = {"WWW-Authenticate": 'Bearer realm="paddock"'} if status == 401 else {}
    if seconds := retry_after(error):
        headers["Retry-After"] = str(max(round(seconds), 1))
    return _error(
        status, f"{error.message}; {error.hint}" if error.hint else error.message, headers
    )


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error in the form of JSON-RPC, without the id of a request."""
    problem = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": message}}
    return Response(msgspec.json.encode(problem), status, headers, media_type="application/json")
