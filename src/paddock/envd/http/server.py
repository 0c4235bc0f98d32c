"""A small HTTP/1.1 server: keep-alive, chunked bodies both ways, flow control both ways.

Knows nothing of routes or protocols: every request becomes an `HttpRequest` given to one handler.
Parsing is httptools'; sockets are handed in already listening. Requests of one connection are
answered in order, one at a time; a connection that goes away cancels the handler at work.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import BinaryIO, cast

import httptools

from paddock.envd.http.request import Body, ClientGoneError, HttpRequest

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
BODY_HIGH = 1 << 20
BODY_LOW = 256 << 10
WRITE_HIGH = 256 << 10
IDLE_SECONDS = 640.0
LINGER_SECONDS = 30.0


Handler = Callable[[HttpRequest], Awaitable[None]]


class HttpConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._pending: deque[HttpRequest] = deque()
        self._incoming: HttpRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._target = b""
        self._header_bytes = 0
        self._in_headers = True
        self._headers: list[tuple[str, str]] = []
        self._is_reading = True
        self._can_write: asyncio.Future[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._lost = False
        self._lingering: HttpRequest | None = None

    # -- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, start the idle clock."""
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH)
        self._server.connections.add(self)
        self._arm_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever was going on for this client ends."""
        self._lost = True
        self._disarm_idle()
        self._server.connections.discard(self)
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_exception(ClientGoneError("the client went away"))
            self._can_write.exception()
        for request in (self._incoming, *self._pending):
            if request is not None and not request.body.is_complete:
                request.body.fail(ClientGoneError("the client went away"))
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        if self._lingering is None:
            self._disarm_idle()
        if self._in_headers:
            self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "protocol upgrades are not supported")
        except httptools.HttpParserError:
            self._refuse(400, "the request is not valid HTTP/1.1")
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "the request head is too large")
        if self._task is None and self._lingering is None and not self._lost:
            self._arm_idle()

    def eof_received(self) -> bool:
        """Whoever stops sending has gone: a stream must not be held for it."""
        return False

    def pause_writing(self) -> None:
        """The client is slow."""
        if self._can_write is None:
            self._can_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """The client caught up."""
        waiter, self._can_write = self._can_write, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- parser callbacks (names are httptools')

    def on_message_begin(self) -> None:
        """A request starts."""
        self._target = b""
        self._headers = []
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        """Part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """The head is whole: make an exchange of it."""
        self._in_headers = False
        self._header_bytes = 0
        method = self._parser.get_method().decode("latin-1")
        request = HttpRequest(self, method, self._target)
        for name, value in self._headers:
            known = request.headers.get(name)
            request.headers[name] = value if known is None else f"{known}, {value}"
        request.keep_alive = self._parser.should_keep_alive()
        request.is_http10 = self._parser.get_http_version() == "1.0"
        expect = request.headers.get("expect", "")
        request.body.expects_continue = expect.lower() == "100-continue"
        self._incoming = request
        self._pending.append(request)
        self._next()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        if self._incoming is not None:
            self._incoming.body.feed(body)
            if self._incoming.body.buffered > BODY_HIGH:
                self._pause_reading()

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._incoming is not None:
            self._incoming.body.finish()
            if self._incoming is self._lingering:
                self._settle(self._incoming)
            self._incoming = None
        self._in_headers = True
        if len(self._pending) > 16:
            self._pause_reading()

    # -- used by Body and Exchange

    def body_consumed(self, body: Body) -> None:
        """Room for more of the body."""
        if not self._is_reading and body.buffered < BODY_LOW:
            self._resume_reading()

    def send_continue(self) -> None:
        """The handler wants the body after all."""
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def write(self, data: bytes) -> None:
        """Hand bytes to the transport."""
        if self._transport is not None and not self._lost:
            self._transport.write(data)

    async def drained(self) -> None:
        """Wait until the client has taken enough."""
        if self._lost:
            raise ClientGoneError("the client went away")
        if self._can_write is not None:
            await asyncio.shield(self._can_write)

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        """Send from file to socket without copying through this process."""
        if self._lost or self._transport is None:
            raise ClientGoneError("the client went away")
        loop = asyncio.get_running_loop()
        sent = await loop.sendfile(self._transport, file, offset, count)
        if sent != count:
            self.abort()  # the file shrank under us: the promised length cannot be kept

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> bool:
        """Close unless a request is being served or has begun to arrive."""
        if self._task is not None or self._incoming is not None or self._pending:
            return False
        if self._transport is not None:
            sock: socket.socket = self._transport.get_extra_info("socket")
            with contextlib.suppress(BlockingIOError, AttributeError):
                if _peek(sock):
                    return False
            self._transport.close()
        return True

    # -- serving

    def _next(self) -> None:
        if self._task is not None or not self._pending or self._lost:
            return
        request = self._pending.popleft()
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._serve(request), name=f"http {request.path}")

    async def _serve(self, request: HttpRequest) -> None:
        self._server.in_flight += 1
        try:
            await self._server.handler(request)
        except asyncio.CancelledError:
            self.abort()
            raise
        except ClientGoneError:
            self.abort()
        except Exception:
            log.exception("request failed", extra={"path": request.path})
            if request.is_started:
                self.abort()
            else:
                request.respond(500, b'{"code":500,"message":"internal error"}')
        finally:
            self._server.in_flight -= 1
            self._server.touch()
            self._done(request)

    def _done(self, request: HttpRequest) -> None:
        self._task = None
        if self._lost or self._transport is None:
            return
        if not request.body.is_complete and not request.body.expects_continue:
            self._linger(request)
        else:
            self._settle(request)

    def _settle(self, request: HttpRequest) -> None:
        """The answer is sent and the request is over: go on to the next, or close."""
        self._lingering = None
        if not request.keep_alive or not request.body.is_complete:
            if self._transport is not None:
                self._transport.close()
            return
        self._resume_reading()
        if self._pending:
            self._next()
        else:
            self._arm_idle()

    def _linger(self, request: HttpRequest) -> None:
        """Take in what is left of a body nobody wants.

        Closing now would make the kernel reset the connection, and the client, still sending, would
        never see why it was refused. Often only the mark of the end is missing.
        """
        request.body.discard()
        self._lingering = request
        self._resume_reading()
        self._disarm_idle()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(LINGER_SECONDS, self.abort)

    def _refuse(self, status: int, message: str) -> None:
        if self._task is None and self._transport is not None:
            body = b'{"code":%d,"message":"%b"}' % (status, message.encode())
            request = HttpRequest(self, "GET", b"/")
            request.keep_alive = False
            request.respond(status, body, headers=[("Content-Type", "application/json")])
            self._transport.close()
        else:
            self.abort()

    def _pause_reading(self) -> None:
        if self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._is_reading and self._transport is not None and not self._lost:
            self._is_reading = True
            self._transport.resume_reading()

    def _arm_idle(self) -> None:
        self._disarm_idle()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(IDLE_SECONDS, self.close_if_idle)

    def _disarm_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _peek(sock: socket.socket) -> bytes:
    with socket.socket(fileno=socket.dup(sock.fileno())) as copy:
        return copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)


class HttpServer:
    """A handler behind a listening socket."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections: set[HttpConnection] = set()
        self.in_flight = 0
        self.last_active = 0.0
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve a socket that already listens."""
        loop = asyncio.get_running_loop()
        self.touch()
        listener.setblocking(False)
        if listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(
                lambda: HttpConnection(self), sock=listener, backlog=1024
            )
        else:
            self._server = await loop.create_server(
                lambda: HttpConnection(self), sock=listener, backlog=1024
            )

    def touch(self) -> None:
        """Something happened: idleness counts from now."""
        self.last_active = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Stop accepting and cut every connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.abort()
