"""Upstream connections, to sandboxes and to the API, kept alive between requests.

A connection that sent unsolicited bytes is never reused. The pool is in `connection_pool`.
"""

import asyncio
from typing import cast

from msgspec import structs

from paddock.gateway.http.bodies import BadBody, ChunkedReader
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.http.protocols import PauseReason
from paddock.gateway.http.request_heads import MAX_HEAD_BYTES, BadHead
from paddock.gateway.http.response_heads import ResponseHead, read_response
from paddock.gateway.http.response_scope import scoped

IDLE_LIMIT = 64
"""Idle connections kept per pool key."""
WRITE_BUFFER_BYTES = 128 * 1024


class IdleConnections:
    """The idle connections of one pool key. Once closed, it takes none back."""

    __slots__ = ("connections", "idle", "is_open")

    def __init__(self) -> None:
        self.idle: list[UpstreamConnection] = []
        self.connections = 0
        """The number of open connections, idle or in use."""
        self.is_open = True

    def take(self) -> "UpstreamConnection | None":
        """Return an idle connection, the most recently used first, or None."""
        idle = self.idle
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    def close(self) -> None:
        """Abort idle connections; those in use are not kept afterwards."""
        self.is_open = False
        for connection in tuple(self.idle):
            connection.abort()
        self.idle.clear()


class UpstreamConnection(asyncio.Protocol):
    """One upstream connection."""

    __slots__ = (
        "_body",
        "_body_left",
        "_buffer",
        "_exchange",
        "_has_served",
        "_idle",
        "_pauses",
        "_response",
        "_transport",
        "idle_since",
    )

    def __init__(self, idle_connections: IdleConnections) -> None:
        self._idle = idle_connections
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._response: ResponseHead | None = None
        """The response whose body is being read."""
        self._buffer = b""
        self._body_left = 0
        self._body: ChunkedReader | None = None
        self._pauses = 0
        self.idle_since: float | None = None
        """When it was first seen idle."""
        self._has_served = False

    # ---- asyncio -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._idle.connections += 1

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the sandbox."""
        exchange = self._exchange
        if exchange is None:
            # Unsolicited bytes: the next request must not receive them.
            self.abort()
        elif exchange.is_tunnel:
            exchange.response_bytes += len(data)
            exchange.client.write(data)
        elif self._response is not None:
            self._read_body(exchange, self._response, data)
        elif self._buffer:
            self._read_heads(exchange, self._buffer + data)
        else:
            self._read_heads(exchange, data)

    def eof_received(self) -> bool:
        """Handle end-of-file from the sandbox."""
        exchange = self._exchange
        if exchange is None:
            return False
        if exchange.is_tunnel:
            exchange.upstream_eof()
            return True
        response = self._response
        if response is not None and response.framing.is_until_close:
            exchange.response_end([], reusable=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        idle_connections = self._idle
        idle_connections.connections -= 1
        if self in idle_connections.idle:
            idle_connections.idle.remove(self)
        exchange, self._exchange = self._exchange, None
        self._transport = None
        if exchange is not None:
            exchange.upstream_lost()

    def pause_writing(self) -> None:
        """Stop reading from the client until the sandbox has caught up."""
        if self._exchange is not None:
            self._exchange.client.pause(PauseReason.OTHER_SIDE_FULL)

    def resume_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.client.resume(PauseReason.OTHER_SIDE_FULL)

    # ---- exchange's side -----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def serve(self, exchange: Exchange, head: bytes) -> None:
        """Send a request over this connection."""
        self._exchange = exchange
        exchange.upstream = self
        exchange.sent = head
        exchange.is_reusing = self._has_served
        self._has_served = True
        if exchange.pending is not None:
            head += exchange.take_pending()
        self.write(head)

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def write_all(self, pieces: tuple[bytes, ...]) -> None:
        """Write several buffers without joining them."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.writelines(pieces)

    def write_eof(self) -> None:
        """Half-close: no more bytes follow."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and transport.can_write_eof():
            transport.write_eof()

    def pause(self, reason: int) -> None:
        """Stop reading from the sandbox for this reason."""
        if not self._pauses and self._transport is not None and self.is_open:
            self._transport.pause_reading()
        self._pauses |= reason

    def resume(self, reason: int) -> None:
        """Read from the sandbox again, unless another reason remains."""
        if not self._pauses & reason:
            return
        self._pauses &= ~reason
        if not self._pauses and self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def done(self, *, reusable: bool) -> None:
        """Return the connection to the pool, or close it."""
        exchange, self._exchange = self._exchange, None
        self._response = None
        self._body = None
        if exchange is not None and exchange.client.pauses:
            # The next request must not stay paused because of this one's backpressure.
            exchange.client.resume(PauseReason.OTHER_SIDE_FULL)
        if self._pauses:
            self.resume(self._pauses)
        idle_connections, transport = self._idle, self._transport
        if (
            reusable
            and not self._buffer
            and idle_connections.is_open
            and len(idle_connections.idle) < IDLE_LIMIT
            and transport is not None
            and not transport.is_closing()
        ):
            self.idle_since = None
            idle_connections.idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        """Close once everything is sent."""
        self._exchange = None
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client.resume(PauseReason.OTHER_SIDE_FULL)
        if self._transport is not None:
            self._transport.abort()

    # ---- reading -------------------------------------------------------------------------

    def _read_heads(self, exchange: Exchange, data: bytes) -> None:
        """Parse the response head, and 1xx heads before it."""
        self._buffer = b""
        while data and self._exchange is exchange:
            stop = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
            if stop < 0:
                self._buffer = data
                if len(data) >= MAX_HEAD_BYTES:
                    exchange.fail(502, "The sandbox answered with a head that is too large")
                return
            try:
                response = read_response(data[: stop + 2], method=exchange.head.method)
            except BadHead as bad:
                exchange.fail(502, bad.message)
                return
            if exchange.prefix is not None:
                response = scoped(response, exchange.prefix)
            data = data[stop + 4 :]
            if len(data) == response.whole_length:
                # The common case: the whole response is here.
                exchange.whole_response(response, data)
                return
            if response.status >= 200:
                self._begin(exchange, response, data)
                return
            if response.status == 101:
                self._switch_protocols(exchange, response, data)
                return
            exchange.interim_response(response)

    def _begin(self, exchange: Exchange, response: ResponseHead, rest: bytes) -> None:
        length = response.framing.length
        if length is not None:
            if len(rest) > length:
                # Bytes beyond the end prevent reuse of the connection.
                self._buffer = rest[length:]
                exchange.whole_response(response, rest[:length])
            else:
                self._response = response
                self._body_left = length - len(rest)
                exchange.response_head(response, rest)
            return
        self._response = response
        self._body = ChunkedReader() if response.framing.is_chunked else None
        exchange.response_head(response, b"")
        if rest:
            self._read_body(exchange, response, rest)

    def _read_body(self, exchange: Exchange, response: ResponseHead, data: bytes) -> None:
        reader = self._body
        if reader is not None:
            self._read_chunks(exchange, response, reader, data)
        elif response.framing.is_until_close:
            exchange.response_body(data)
        elif len(data) < self._body_left:
            self._body_left -= len(data)
            exchange.response_body(data)
        else:
            self._buffer = data[self._body_left :]
            exchange.response_body(data[: self._body_left] if self._buffer else data)
            self._end(exchange, response, [])

    def _read_chunks(
        self, exchange: Exchange, response: ResponseHead, reader: ChunkedReader, data: bytes
    ) -> None:
        try:
            pieces, is_done = reader.feed(data)
        except BadBody:
            exchange.fail(502, "The sandbox sent a body that cannot be read")
            return
        for piece in pieces:
            exchange.response_body(piece)
        if is_done and self._exchange is exchange:
            self._buffer = reader.rest
            self._end(exchange, response, reader.trailers)

    @staticmethod
    def _end(exchange: Exchange, response: ResponseHead, trailers: list[bytes]) -> None:
        exchange.response_end(trailers, reusable=response.is_keep_alive)

    def _switch_protocols(self, exchange: Exchange, response: ResponseHead, early: bytes) -> None:
        if exchange.head.upgrade is None or not exchange.is_request_done:
            exchange.fail(502, "the sandbox sent 101 without an Upgrade request")
            return
        if response.upgrade is None:
            response = structs.replace(response, upgrade=exchange.head.upgrade)
        exchange.switch_protocols(response)
        if early:
            exchange.response_bytes += len(early)
            exchange.client.write(early)
