"""One request, one answer, on kept connections: HTTP/1.1 with as little as it takes.

A general client spends as much on a request as everything else that a claim does together. This
one writes ready-made bytes, parses with httptools and keeps connections; it does not retry, follow
or decode. Whether to ask again is its user's business, and endless answers are not for here.
"""

import asyncio
import socket
import ssl
from typing import cast
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

_KEPT_SECONDS = 60.0
"""How long an unused connection is trusted; servers close theirs later than that."""
_KEEPALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 15),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
    (socket.TCP_USER_TIMEOUT, socket.IPPROTO_TCP, 30_000),
    (socket.TCP_NODELAY, socket.IPPROTO_TCP, 1),
)
"""A peer that vanished without a word is noticed within half a minute."""

AddressInfo = tuple[int, int, int, str, tuple[object, ...]]


class HttpResponse(Struct, frozen=True):
    """What came back."""

    code: int
    retry_after: str
    body: bytes


class NoConnectionError(Exception):
    """The server cannot have heard of the request; the cause says why."""


def open_socket(address: AddressInfo) -> socket.socket:
    """Make a socket that notices when its peer has vanished."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    for option, level, value in _KEEPALIVE:
        made.setsockopt(level, option, value)
    return made


class HttpClient:
    """Connections to one server, each for one request at a time."""

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
        """Where the API begins; a proxy may serve several."""
        self._name = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = tls if url.scheme == "https" else None
        self._tls_name = (tls_server_name or self._name) if self._tls is not None else None
        self._connect_seconds = connect_seconds
        self._all: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._is_closed = False

    async def send(self, request: bytes, timeout_seconds: float) -> HttpResponse:
        """Send a request and give its answer.

        `NoConnectionError` if there was nobody to send it to, `TimeoutError` if there is no answer
        in time, `OSError` if the connection broke meanwhile.
        """
        connection = self._kept() or await self._connect()
        answer = await connection.send(request, timeout_seconds)
        if connection.is_usable:
            connection.idle_since = connection.loop.time()
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Cut every connection, and make no other."""
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
            raise NoConnectionError("it was closed")
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
            # TLS failures and timeouts are among them, and names that cannot be looked up.
            raise NoConnectionError(str(error)) from error
        if self._is_closed:  # meanwhile
            connection.abort()
            raise NoConnectionError("it was closed")
        return connection

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        """Reach the first of the server's addresses that answers."""
        found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        for number, info in enumerate(found):
            made = open_socket(cast("AddressInfo", info))
            try:
                # One that swallows everything leaves the others their part of the time.
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
    """One connection; its parser goes on from answer to answer."""

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
        """Send a request and wait for its answer; after any failure the connection is no more."""
        if self._transport is None:
            raise ConnectionResetError("the connection has ended")
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
        """Cut it."""
        if self._transport is not None:
            self._transport.abort()

    # ---- transport -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._siblings.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._siblings.discard(self)
        self._fail(exc or ConnectionResetError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"not an answer in HTTP: {error}"))
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
            return  # the answer proper is still to come
        parts, self._parts = self._parts, []
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._parser.should_keep_alive():
            # Whoever talks without having been asked is not heard again.
            self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_result(HttpResponse(code, self._retry_after.decode("latin-1"), body))
