"""A minimal HTTP/1.1 client with keep-alive connections.

A general client spends as much CPU on a request as the rest of a claim. This one writes ready-made
bytes, parses with httptools and keeps connections. It does not retry, follow redirects, decode or
stream: retries are up to the caller, and streaming responses need another client.
"""

import asyncio
import socket
import ssl
from typing import cast
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

_KEPT_SECONDS = 60.0
"""How long an idle connection is reused; servers close theirs later than that."""
_KEEPALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 15),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
    (socket.TCP_USER_TIMEOUT, socket.IPPROTO_TCP, 30_000),
    (socket.TCP_NODELAY, socket.IPPROTO_TCP, 1),
)
"""A peer that vanished without closing the connection is noticed within half a minute."""

AddressInfo = tuple[int, int, int, str, tuple[object, ...]]


class HttpResponse(Struct, frozen=True):
    """A response: status code, Retry-After header and body."""

    code: int
    retry_after: str
    body: bytes


class NoConnectionError(Exception):
    """The request was not sent, because there is no connection; the cause says why."""


def open_socket(address: AddressInfo) -> socket.socket:
    """Return a socket that notices when its peer has vanished."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    for option, level, value in _KEEPALIVE:
        made.setsockopt(level, option, value)
    return made


class HttpClient:
    """Connections to one server, each with one request in flight at a time."""

    def __init__(
        self,
        server: str,
        *,
        tls: ssl.SSLContext | None,
        tls_server_name: str | None,
        connect_seconds: float,
    ) -> None:
        url = urlsplit(server)
        self.host = url.netloc.rpartition("@")[2]
        """As the Host header names it."""
        self.prefix = url.path
        """The path at which the API starts; a proxy may serve several."""
        self._name = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = tls if url.scheme == "https" else None
        self._tls_name = (tls_server_name or self._name) if self._tls is not None else None
        self._connect_seconds = connect_seconds
        self._all: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._is_closed = False

    async def send(self, request: bytes, timeout_seconds: float) -> HttpResponse:
        """Send a request and return its response.

        Raises `NoConnectionError` if no connection could be made, `TimeoutError` if there is no
        response in time, `OSError` if the connection broke meanwhile.
        """
        connection = self._kept() or await self._connect()
        response = await connection.send(request, timeout_seconds)
        if connection.is_usable:
            connection.idle_since = connection.loop.time()
            self._idle.append(connection)
        return response

    def close(self) -> None:
        """Abort every connection, and make no new ones."""
        self._is_closed = True
        self._idle.clear()
        for connection in tuple(self._all):
            connection.abort()

    def _kept(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_usable:
                continue
            if connection.loop.time() - connection.idle_since < _KEPT_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise NoConnectionError("the client is closed")
        try:
            async with asyncio.timeout(self._connect_seconds):
                made = await self._connected(loop)
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._all),
                    sock=made,
                    ssl=self._tls,
                    server_hostname=self._tls_name,
                )
        except (OSError, UnicodeError) as error:
            # Includes TLS failures, timeouts, and names that cannot be resolved.
            raise NoConnectionError(str(error)) from error
        if self._is_closed:  # while connecting
            connection.abort()
            raise NoConnectionError("the client is closed")
        return connection

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        """Connect to the first of the server's addresses that accepts."""
        found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        for number, info in enumerate(found):
            made = open_socket(cast("AddressInfo", info))
            try:
                # An address that drops packets leaves the others their share of the time.
                async with asyncio.timeout(self._connect_seconds / (len(found) - number)):
                    await loop.sock_connect(made, info[4])
            except OSError as error:
                made.close()
                failure = failure or error
            except BaseException:
                made.close()
                raise
            else:
                return made
        raise failure or OSError(f"{self._name} has no address")


class _Connection(asyncio.Protocol):
    """One connection; its parser is reused from response to response."""

    def __init__(self, loop: asyncio.AbstractEventLoop, siblings: "set[_Connection]") -> None:
        self.loop = loop
        self.idle_since = 0.0
        self._siblings = siblings
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[HttpResponse] | None = None
        self._retry_after = b""
        self._parts: list[bytes] = []

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, timeout_seconds: float) -> HttpResponse:
        """Send a request and wait for its response; any failure closes the connection."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        waiter = self._waiter = self.loop.create_future()
        timer = self.loop.call_later(timeout_seconds, self._fail, TimeoutError())
        try:
            self._transport.write(request)
            return await waiter
        except BaseException:
            self.abort()
            raise
        finally:
            timer.cancel()
            self._waiter = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- transport -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._siblings.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._siblings.discard(self)
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the response is not valid HTTP: {error}"))
            self.abort()

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # ---- parser callbacks (names are httptools') -------------------------------------------

    def on_message_begin(self) -> None:
        self._retry_after = b""
        self._parts = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 11 and name.lower() == b"retry-after":
            self._retry_after = value

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        code = self._parser.get_status_code()
        if code < 200:
            return  # 1xx: the final response follows
        parts, self._parts = self._parts, []
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._parser.should_keep_alive():
            # A response that no request asked for: the connection is not reused.
            self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_result(HttpResponse(code, self._retry_after.decode("latin-1"), body))
