"""Client connections: requests are parsed strictly, one after the other.

Pipelined requests wait unparsed in a small buffer; reading pauses when it is full, and no request
is started while earlier responses are still unsent, so memory stays bounded. Reading continues
while a request is held, so a disconnect is noticed.
"""

import asyncio
import re
import socket
import struct
from typing import cast

from paddock.gateway.http.bodies import BadBody, ChunkedReader
from paddock.gateway.http.error_responses import error_response
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.http.protocols import PauseReason, RequestHandler
from paddock.gateway.http.request_heads import MAX_HEAD_BYTES, BadHead

HALF_CLOSED_SECONDS = 10.0
"""After a half-close a client gets this long to receive a response; then it counts as gone."""
LINGER_SECONDS = 2.0
"""How long input is discarded after an error response, so that the client can read it."""
WRITE_BUFFER_BYTES = 128 * 1024
_PIPELINE_BYTES = 64 * 1024
_CARRIAGE_RETURN = 13
_NOT_RESERVED_FOR = frozenset((401, 403, 429, 503))
"""Responses to requests that were not authenticated, after which a reserved connection closes."""
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: closing sends a reset."""


class ClientConnection(asyncio.Protocol):
    """One connection from a client."""

    __slots__ = (
        "_body",
        "_body_left",
        "_buffer",
        "_exchange",
        "_handler",
        "_has_eof",
        "_is_closing",
        "_is_reading",
        "_is_write_paused",
        "_timer",
        "_transport",
        "head_since",
        "idle_since",
        "is_reserved",
        "is_silent",
        "opened_at",
        "origin",
        "pauses",
        "peer",
        "scheme",
        "trusts_forwarded",
    )

    def __init__(self, handler: RequestHandler, *, trusts_forwarded: bool = False) -> None:
        self._handler = handler
        self.scheme = "http"
        self.trusts_forwarded = trusts_forwarded
        """Whether this client is our own TLS proxy, whose X-Forwarded headers are trusted."""
        self.peer = ""
        self.origin = ""
        """Everything about this client that is forwarded to a sandbox, as one key."""
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._buffer = b""
        self._body_left = 0
        """Body bytes still to come, if the length is known."""
        self._body: ChunkedReader | None = None
        self.pauses = 0
        self._is_closing = False
        self._has_eof = False
        self._is_write_paused = False
        """Whether the client reads too slowly, so that writes are paused."""
        self._is_reading = False
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since: float | None = None
        """When it was first seen idle."""
        self.head_since: float | None = None
        """When the first byte of an incomplete head arrived."""
        self.opened_at = 0.0
        self.is_silent = True
        """Whether it has not sent a request yet."""
        self.is_reserved = False
        """Whether it was accepted beyond the limit: only authenticated requests are served."""

    # ---- asyncio -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, or refuse it if there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer: tuple[str, int] | str | None = transport.get_extra_info("peername")
        self.peer = peer[0] if peer and not isinstance(peer, str) else "local"
        self.origin = f"{self.peer} {self.scheme} {self.trusts_forwarded}"
        self.opened_at = self._handler.now()
        opened: socket.socket | None = transport.get_extra_info("socket")
        refusal = self._handler.clients.add(self, opened.fileno() if opened is not None else -1)
        if refusal is not None:
            self._transport.write(error_response(503, refusal, retry_after_seconds=1))
            self.close()

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client."""
        exchange = self._exchange
        if exchange is None:
            # The common case: exactly one head.
            if (
                data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4 == len(data) > 4
                and not self._buffer
                and not self._is_closing
                and not self._is_write_paused
                and data[0] != _CARRIAGE_RETURN
            ):
                self._start_exchange(data[:-2], b"")
                return
        else:
            if exchange.is_tunnel:
                exchange.request_bytes += len(data)
                if exchange.upstream is not None:
                    exchange.upstream.write(data)
                return
            if not exchange.is_request_done:
                data = self._read_body(exchange, data)
                if not data:
                    return
        if self._is_closing:
            return
        self._buffer = self._buffer + data if self._buffer else data
        if self._exchange is None:
            self._read_heads()
        if len(self._buffer) > _PIPELINE_BYTES:
            self.pause(PauseReason.PIPELINE_FULL)

    def eof_received(self) -> bool:
        """Handle end-of-file; a complete request is still answered."""
        self._has_eof = True
        exchange = self._exchange
        if exchange is None:
            # Pipelined requests may still wait until earlier responses are sent.
            return self._is_write_paused and bool(self._buffer)
        if exchange.is_tunnel:
            exchange.client_eof()
            return True
        if not exchange.is_request_done:
            exchange.client_lost()
            return False
        self._start_timer(HALF_CLOSED_SECONDS)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._handler.clients.remove(self)
        exchange, self._exchange = self._exchange, None
        self._buffer = b""
        if exchange is not None:
            exchange.client_lost()

    def pause_writing(self) -> None:
        """Stop reading from the sandbox until the client has caught up."""
        self._is_write_paused = True
        exchange = self._exchange
        if exchange is not None and exchange.upstream is not None:
            exchange.upstream.pause(PauseReason.OTHER_SIDE_FULL)

    def resume_writing(self) -> None:
        """Read from the sandbox again, or continue with the next request."""
        self._is_write_paused = False
        exchange = self._exchange
        if exchange is None:
            self._serve_pipelined()
        elif exchange.upstream is not None:
            exchange.upstream.resume(PauseReason.OTHER_SIDE_FULL)

    # ---- exchange's side -----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return self._exchange is None

    @property
    def is_evictable(self) -> bool:
        """Whether closing it now loses nothing: no request is in flight, no byte is unsent."""
        transport = self._transport
        return (
            self._exchange is None
            and transport is not None
            and (self.is_silent or not self._buffer)
            and not transport.get_write_buffer_size()
        )

    @property
    def is_closing(self) -> bool:
        """Whether it closes once everything is sent."""
        return self._transport is not None and self._transport.is_closing()

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
        """Stop reading from the client for this reason."""
        transport = self._transport
        if not self.pauses and transport is not None and not transport.is_closing():
            transport.pause_reading()
        self.pauses |= reason

    def resume(self, reason: int) -> None:
        """Read from the client again, unless another reason remains."""
        if not self.pauses & reason:
            return
        self.pauses &= ~reason
        transport = self._transport
        if not self.pauses and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def abort(self) -> None:
        """Reset the connection, so that the client cannot mistake it for a regular end."""
        self._is_closing = True
        transport = self._transport
        if transport is not None:
            opened: socket.socket | None = transport.get_extra_info("socket")
            if opened is not None and not transport.is_closing():
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()

    def close(self) -> None:
        """Close once everything is sent."""
        self._is_closing = True
        self._buffer = b""
        self.head_since = None
        if self._transport is not None:
            self._transport.close()

    def finished(self, exchange: Exchange, *, keep_alive: bool) -> None:
        """Continue with the next request, or close."""
        if self._exchange is not exchange:
            return
        self._exchange = None
        if self.is_reserved and exchange.status in _NOT_RESERVED_FOR:
            keep_alive = False
        if not keep_alive or self._is_closing:
            if exchange.is_request_done and not self._buffer:
                self.close()
            else:
                self._linger()
            return
        self.idle_since = None
        if self._buffer or self._has_eof:
            self._serve_pipelined()

    def tunnel(self, exchange: Exchange) -> None:
        """Relay raw bytes from now on."""
        early, self._buffer = self._buffer, b""
        if early and exchange.upstream is not None:
            exchange.request_bytes += len(early)
            exchange.upstream.write(early)
        self.resume(PauseReason.PIPELINE_FULL)
        if self._has_eof:
            exchange.client_eof()

    # ---- reading -------------------------------------------------------------------------

    def _serve_pipelined(self) -> None:
        """Serve pipelined requests, as far as earlier responses are sent."""
        if self._is_reading:
            return
        self._read_heads()
        if len(self._buffer) <= _PIPELINE_BYTES:
            self.resume(PauseReason.PIPELINE_FULL)
        if (
            self._has_eof
            and self._exchange is None
            and not (self._is_write_paused and self._buffer)
        ):
            self.close()

    def _read_heads(self) -> None:
        """Parse heads from the buffer, as long as each request ends at once."""
        self._is_reading = True
        try:
            while self._buffer and self._exchange is None:
                if self._is_closing or self._is_write_paused or not self._read_head():
                    break
        finally:
            self._is_reading = False

    def _read_head(self) -> bool:
        data = self._buffer
        if (empty := _EMPTY_LINES.match(data)) is not None:
            # Old clients send an empty line after a body.
            data = data[empty.end() :]
        stop = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if stop < 0:
            self._buffer = data
            if len(data) >= MAX_HEAD_BYTES:
                self._refuse(431, "the head is too large")
            elif data and self.head_since is None:
                self.head_since = self._handler.now()
            return False
        self.head_since = None
        return self._start_exchange(data[: stop + 2], data[stop + 4 :])

    def _start_exchange(self, block: bytes, rest: bytes) -> bool:
        handler = self._handler
        try:
            head = handler.read(block)
        except BadHead as bad:
            self._refuse(bad.status, bad.message)
            return False
        if self.is_silent:
            self.is_silent = False
            handler.clients.served(self)
        framing = head.framing
        exchange = Exchange(self, head, handler.now(), handler, framing.length == 0)
        self._exchange = exchange
        if exchange.is_request_done:
            self._buffer = rest
        else:
            self._body = ChunkedReader() if framing.is_chunked else None
            self._body_left = framing.length or 0
            # Body bytes that are already here go first: head and body are then sent together.
            self._buffer = self._read_body(exchange, rest) if rest else b""
            if self._is_closing:
                return False
        handler.dispatch(exchange, self)
        return True

    def _read_body(self, exchange: Exchange, data: bytes) -> bytes:
        """Pass on a piece of the body; return the bytes that follow it."""
        reader = self._body
        if reader is None:
            if len(data) < self._body_left:
                self._body_left -= len(data)
                exchange.body(data)
                return b""
            rest = data[self._body_left :]
            piece = data[: self._body_left] if rest else data
            self._body_left = 0
            exchange.body(piece)
            exchange.request_end([])
            return rest
        try:
            pieces, is_done = reader.feed(data)
        except BadBody as bad:
            self._abort_exchange(exchange, str(bad))
            return b""
        for piece in pieces:
            exchange.body(piece)
        if not is_done:
            return b""
        self._body = None
        exchange.request_end(reader.trailers)
        return reader.rest

    def _abort_exchange(self, exchange: Exchange, message: str) -> None:
        """Abort an exchange whose body is malformed."""
        has_response = exchange.response is not None
        self._exchange = None
        exchange.client_lost()
        if has_response:
            self.abort()
        else:
            self._refuse(400, message)

    def _refuse(self, status: int, message: str) -> None:
        self._handler.clients.count_refused(status)
        self.write(error_response(status, message))
        self._linger()

    def _linger(self) -> None:
        """Close in a way that lets the client read the response first."""
        self._is_closing = True
        self._buffer = b""
        self.head_since = None
        if self._has_eof:
            self.close()
            return
        self.write_eof()
        self.resume(self.pauses)
        self._start_timer(LINGER_SECONDS)

    def _start_timer(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        exchange = self._exchange
        if exchange is not None and exchange.response is not None:
            # A response is in flight: if the client does not read it, writing fails.
            return
        if self._transport is None:
            return
        if exchange is None and self._transport.get_write_buffer_size():
            # The response is being read; the idle sweep closes clients that read nothing.
            self._start_timer(LINGER_SECONDS)
            return
        self._transport.abort()
