"""Connections from clients: requests are read strictly, one after the other.

What a client sends ahead waits unread in a small buffer until its turn comes; reading stops when
that is full, and no request is begun while answers to earlier ones wait to be read, so that what
is held stays bounded. A client that hangs up is noticed while it waits, since reading goes on.
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
"""A client that said it sends nothing more gets an answer this long; then it has hung up."""
LINGER_SECONDS = 2.0
"""How long what a client still sends is thrown away, so that it can read our refusal."""
WRITE_BUFFER_BYTES = 128 * 1024
_PIPELINE_BYTES = 64 * 1024
_CARRIAGE_RETURN = 13
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_RESET = struct.pack("ii", 1, 0)
"""Do not linger: closing sends a reset."""


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
        """Whether this client is a proxy of ours that says whom it speaks for."""
        self.peer = ""
        self.origin = ""
        """What a sandbox is told of this client, in one word."""
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._buffer = b""
        self._body_left = 0
        """Bytes of the body still to come, where its length was told."""
        self._body: ChunkedReader | None = None
        self.pauses = 0
        self._is_closing = False
        self._has_eof = False
        self._is_write_paused = False
        """Whether it was sent more than it takes."""
        self._is_reading = False
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since: float | None = None
        """When it was first seen idle."""
        self.head_since: float | None = None
        """When a head began that is not complete yet."""

    # ---- asyncio -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer: tuple[str, int] | str | None = transport.get_extra_info("peername")
        self.peer = peer[0] if peer and not isinstance(peer, str) else "local"
        self.origin = f"{self.peer} {self.scheme} {self.trusts_forwarded}"
        if not self._handler.clients.add(self):
            self._transport.write(
                error_response(503, "too many connections", retry_after_seconds=1)
            )
            self.close()

    def data_received(self, data: bytes) -> None:
        """Take in what the client sent."""
        exchange = self._exchange
        if exchange is None:
            # A head and nothing else, as most requests are.
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
        """Take in that the client sends nothing more; a complete request is still answered."""
        self._has_eof = True
        exchange = self._exchange
        if exchange is None:
            # What it sent ahead may still wait until it has read earlier answers.
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
        """Take in that the client is gone."""
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
        """Take no more from the sandbox until the client has caught up."""
        self._is_write_paused = True
        exchange = self._exchange
        if exchange is not None and exchange.upstream is not None:
            exchange.upstream.pause(PauseReason.OTHER_SIDE_FULL)

    def resume_writing(self) -> None:
        """Take from the sandbox again, or go on with the next request."""
        self._is_write_paused = False
        exchange = self._exchange
        if exchange is None:
            self._serve_pipelined()
        elif exchange.upstream is not None:
            exchange.upstream.resume(PauseReason.OTHER_SIDE_FULL)

    # ---- exchange's side -----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self._exchange is None

    @property
    def is_closing(self) -> bool:
        """Whether it is to be closed once everything is sent."""
        return self._transport is not None and self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes to the client."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def write_all(self, pieces: tuple[bytes, ...]) -> None:
        """Send bytes that lie apart."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.writelines(pieces)

    def write_eof(self) -> None:
        """Say that nothing more comes."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and transport.can_write_eof():
            transport.write_eof()

    def pause(self, reason: int) -> None:
        """Take no more from the client for now."""
        transport = self._transport
        if not self.pauses and transport is not None and not transport.is_closing():
            transport.pause_reading()
        self.pauses |= reason

    def resume(self, reason: int) -> None:
        """Take from the client again, unless there is another reason not to."""
        if not self.pauses & reason:
            return
        self.pauses &= ~reason
        transport = self._transport
        if not self.pauses and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def abort(self) -> None:
        """Cut the client off, in a way that it cannot take for an end."""
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
        """Go on with the next request, or close."""
        if self._exchange is not exchange:
            return
        self._exchange = None
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
        """Pass bytes on as they are from now on."""
        early, self._buffer = self._buffer, b""
        if early and exchange.upstream is not None:
            exchange.request_bytes += len(early)
            exchange.upstream.write(early)
        self.resume(PauseReason.PIPELINE_FULL)
        if self._has_eof:
            exchange.client_eof()

    # ---- reading -------------------------------------------------------------------------

    def _serve_pipelined(self) -> None:
        """Serve what was sent ahead, as far as its answers are read."""
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
        """Read heads off the buffer, as long as requests end at once."""
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
        framing = head.framing
        exchange = Exchange(self, head, handler.now(), handler, framing.length == 0)
        self._exchange = exchange
        if exchange.is_request_done:
            self._buffer = rest
        else:
            self._body = ChunkedReader() if framing.is_chunked else None
            self._body_left = framing.length or 0
            # What is here of the body goes in first: head and body then leave together.
            self._buffer = self._read_body(exchange, rest) if rest else b""
            if self._is_closing:
                return False
        handler.dispatch(exchange, self)
        return True

    def _read_body(self, exchange: Exchange, data: bytes) -> bytes:
        """Take in a piece of the body; gives what follows it."""
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
        """End an exchange whose body turned out to be unreadable."""
        has_answer = exchange.response is not None
        self._exchange = None
        exchange.client_lost()
        if has_answer:
            self.abort()
        else:
            self._refuse(400, message)

    def _refuse(self, status: int, message: str) -> None:
        self._handler.clients.count_refused(status)
        self.write(error_response(status, message))
        self._linger()

    def _linger(self) -> None:
        """Close in a way that lets the client read what it was sent."""
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
            # An answer is under way: should nobody read it, writing will tell.
            return
        if self._transport is None:
            return
        if exchange is None and self._transport.get_write_buffer_size():
            # The answer is complete and being read; who reads nothing is swept away in the end.
            self._start_timer(LINGER_SECONDS)
            return
        self._transport.abort()
