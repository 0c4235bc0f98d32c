"""A small HTTP/1.1 server: keep-alive, chunked bodies and flow control in both directions.

Has no routes: every request becomes an `HttpRequest` that is passed to one handler. httptools
parses; sockets are passed in already listening. Requests of one connection are served in order,
one at a time. When a connection is lost, its running handler is cancelled.
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
BODY_HIGH_WATER = 1 << 20
BODY_LOW_WATER = 256 << 10
WRITE_HIGH_WATER = 256 << 10
IDLE_SECONDS = 640.0
LINGER_SECONDS = 30.0


Handler = Callable[[HttpRequest], Awaitable[None]]


class HttpConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: "HttpListener") -> None:
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
        self._is_lost = False
        self._lingering: HttpRequest | None = None

    # -- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        if self._server.is_full:
            self._is_lost = True
            transport.abort()
            return
        self._server.connections.add(self)
        self._arm_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running handler and fail bodies that are incomplete."""
        self._is_lost = True
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
        if self._task is None and self._lingering is None and not self._is_lost:
            self._arm_idle()

    def eof_received(self) -> bool:
        """Close on end-of-file: a client that has left must not keep a stream open."""
        return False

    def pause_writing(self) -> None:
        if self._can_write is None:
            self._can_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        waiter, self._can_write = self._can_write, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- parser callbacks, named by httptools

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """Create the request and serve it, unless another one is being served."""
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
        self._serve_next()

    def on_body(self, body: bytes) -> None:
        if self._incoming is not None:
            self._incoming.body.feed(body)
            if self._incoming.body.buffered > BODY_HIGH_WATER:
                self._pause_reading()

    def on_message_complete(self) -> None:
        if self._incoming is not None:
            self._incoming.body.finish()
            if self._incoming is self._lingering:
                self._finish_request(self._incoming)
            self._incoming = None
        self._in_headers = True
        if len(self._pending) > 16:
            self._pause_reading()

    # -- used by Body and HttpRequest

    def body_consumed(self, body: Body) -> None:
        if not self._is_reading and body.buffered < BODY_LOW_WATER:
            self._resume_reading()

    def send_continue(self) -> None:
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._is_lost:
            self._transport.write(data)

    async def drained(self) -> None:
        if self._is_lost:
            raise ClientGoneError("the client went away")
        if self._can_write is not None:
            await asyncio.shield(self._can_write)

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        if self._is_lost or self._transport is None:
            raise ClientGoneError("the client went away")
        loop = asyncio.get_running_loop()
        sent = await loop.sendfile(self._transport, file, offset, count)
        if sent != count:
            self.abort()  # the file has shrunk: Content-Length is wrong

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> bool:
        """Close unless a request is in flight or has begun to arrive; return whether closed."""
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

    def _serve_next(self) -> None:
        if self._task is not None or not self._pending or self._is_lost:
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
            self._finish_response(request)

    def _finish_response(self, request: HttpRequest) -> None:
        self._task = None
        if self._is_lost or self._transport is None:
            return
        if not request.body.is_complete and not request.body.expects_continue:
            self._linger(request)
        else:
            self._finish_request(request)

    def _finish_request(self, request: HttpRequest) -> None:
        """Serve the next request, or close the connection."""
        self._lingering = None
        if not request.keep_alive or not request.body.is_complete:
            if self._transport is not None:
                self._transport.close()
            return
        self._resume_reading()
        if self._pending:
            self._serve_next()
        else:
            self._arm_idle()

    def _linger(self, request: HttpRequest) -> None:
        """Read and discard the rest of a body that no handler reads.

        Closing now would make the kernel reset the connection, and the client, which still sends,
        would not see the response. Often only the end marker is missing.
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
        if not self._is_reading and self._transport is not None and not self._is_lost:
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


class HttpListener:
    """Serves one listening socket with one handler."""

    def __init__(self, handler: Handler, *, max_connections: int | None = None) -> None:
        """More connections than `max_connections` at a time are reset."""
        self.handler = handler
        self.connections: set[HttpConnection] = set()
        self._max_connections = max_connections
        self.in_flight = 0
        self.last_active = 0.0
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve a socket that is already listening."""
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

    @property
    def is_full(self) -> bool:
        """Whether a further connection would be one too many."""
        return self._max_connections is not None and len(self.connections) >= self._max_connections

    def touch(self) -> None:
        """Restart the idle time."""
        self.last_active = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Stop accepting and reset every connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.abort()
