"""The Connect protocol over HTTP/1.1: unary, server-streaming and client-streaming calls.

Framing, codecs (proto3 JSON and protobuf binary), errors, deadlines and end-of-stream frames.
What the methods do is the services' business; who may call is `server`'s.
"""

import asyncio
import base64
import binascii
import logging
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from paddock.envd import proto
from paddock.envd.exchange import BodyTooLargeError, ClientGoneError, Exchange
from paddock.envd.messages import FIELDS, WatcherId, WatchRequest

log = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 20
DEFAULT_KEEPALIVE_SECONDS = 90.0
_HEAD = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
_SNAKE_PRONE: tuple[type[Struct], ...] = (WatchRequest, WatcherId)


class Code(StrEnum):
    """Connect's error codes."""

    CANCELED = "canceled"
    UNKNOWN = "unknown"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    ABORTED = "aborted"
    OUT_OF_RANGE = "out_of_range"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DATA_LOSS = "data_loss"
    UNAUTHENTICATED = "unauthenticated"


STATUS: Mapping[Code, int] = {
    Code.CANCELED: 499,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}


class ConnectError(Exception):
    """A refusal with a Connect code, told to the client as it is."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def to_json(self) -> bytes:
        """Give the wire form of an error."""
        return msgspec.json.encode({"code": self.code.value, "message": printable(self.message)})


def printable(text: str) -> str:
    """Make text valid Unicode: names in a sandbox are arbitrary bytes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# -- codecs ------------------------------------------------------------------------------------


class JsonCodec:
    """proto3 JSON."""

    unary_type = "application/json"
    stream_type = "application/connect+json"

    def encode(self, message: Struct) -> bytes:
        """Write a message."""
        return msgspec.json.encode(message)

    def decode(self, data: bytes, kind: type[Struct]) -> Struct:
        """Read a message: fast if it is spelt the usual way, else forgivingly."""
        if kind not in _SNAKE_PRONE:
            try:
                return msgspec.json.decode(data or b"{}", type=kind)
            except msgspec.ValidationError:
                pass
            except (msgspec.DecodeError, RecursionError) as error:
                raise proto.DecodeError(str(error)) from error
        return proto.from_json(data or b"{}", kind, FIELDS)


class BinaryCodec:
    """Protobuf binary."""

    unary_type = "application/proto"
    stream_type = "application/connect+proto"

    def encode(self, message: Struct) -> bytes:
        """Write a message."""
        return proto.encode(message, FIELDS)

    def decode(self, data: bytes, kind: type[Struct]) -> Struct:
        """Read a message."""
        return proto.decode(data, kind, FIELDS)


Codec = JsonCodec | BinaryCodec
_JSON, _BINARY = JsonCodec(), BinaryCodec()
_UNARY: Mapping[str, Codec] = {c.unary_type: c for c in (_JSON, _BINARY)}
_STREAM: Mapping[str, Codec] = {c.stream_type: c for c in (_JSON, _BINARY)}


# -- envelopes ---------------------------------------------------------------------------------


def envelope(payload: bytes, flags: int = 0) -> bytes:
    """Frame a message of a stream."""
    return _HEAD.pack(flags, len(payload)) + payload


class EnvelopeReader:
    """Cuts a byte stream into envelopes, however it is split."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take bytes, give the envelopes that are whole now."""
        self._buffer += data
        found: list[tuple[int, bytes]] = []
        position = 0
        while len(self._buffer) - position >= _HEAD.size:
            flags, length = _HEAD.unpack_from(self._buffer, position)
            if length > self._limit:
                raise ConnectError(
                    Code.RESOURCE_EXHAUSTED, f"message of {length} bytes is larger than allowed"
                )
            end = position + _HEAD.size + length
            if len(self._buffer) < end:
                break
            found.append((flags, bytes(self._buffer[position + _HEAD.size : end])))
            position = end
        del self._buffer[:position]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether the stream may end here."""
        return not self._buffer


def inflate(data: bytes, limit: int = MAX_MESSAGE) -> bytes:
    """Decompress a gzip message, bounded."""
    try:
        engine = zlib.decompressobj(wbits=31)
        out = engine.decompress(data, limit)
    except zlib.error as error:
        raise ConnectError(Code.INVALID_ARGUMENT, f"message is not gzip: {error}") from error
    if engine.unconsumed_tail:
        raise ConnectError(Code.RESOURCE_EXHAUSTED, "compressed message is larger than allowed")
    if not engine.eof:
        raise ConnectError(Code.INVALID_ARGUMENT, "compressed message is truncated")
    return out


# -- calls -------------------------------------------------------------------------------------


class Call:
    """What a method knows of its caller besides the message."""

    def __init__(self, exchange: Exchange) -> None:
        self._headers = exchange.headers
        self.timeout = self._read_timeout()
        """Seconds the client gives us, or `None`."""

    @property
    def username(self) -> str | None:
        """User named by Basic authorization, `None` for the default user."""
        scheme, _, value = self._headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            name, _, _ = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ConnectError(
                Code.UNAUTHENTICATED, "the Authorization header is not valid Basic authorization"
            ) from error
        return name or None

    @property
    def keepalive_seconds(self) -> float:
        """How long a stream may be silent."""
        value = self._headers.get("keepalive-ping-interval", "")
        return float(value) if value.isdigit() and int(value) > 0 else DEFAULT_KEEPALIVE_SECONDS

    def _read_timeout(self) -> float | None:
        value = self._headers.get("connect-timeout-ms")
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and len(value) <= 10):
            raise ConnectError(
                Code.INVALID_ARGUMENT, f"connect-timeout-ms is not a number: {value!r}"
            )
        return int(value) / 1000


class Stream:
    """The sending side of a server stream."""

    def __init__(self, exchange: Exchange, codec: Codec) -> None:
        self._exchange = exchange
        self._codec = codec
        self._kept = b""

    async def send(self, *messages: Struct, is_last: bool = False) -> None:
        """Send messages at once; waits while the client is slow. The last leave with the end."""
        data = b"".join(envelope(self._codec.encode(m)) for m in messages)
        if is_last:
            self._kept = data
        else:
            await self._write(data)

    async def end(self, payload: bytes) -> None:
        """Send the end frame."""
        await self._write(self._kept + envelope(payload, _END), is_last=True)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        # Not before there is something to say: some clients stop sending the request when the
        # response begins.
        if not self._exchange.is_started:
            self._exchange.start(200, [("Content-Type", self._codec.stream_type)])
        await self._exchange.write(data, is_last=is_last)


class Unary(Struct, frozen=True):
    """One message in, one out."""

    request: type[Struct]
    handler: Callable[[Call, Any], Awaitable[Struct]]


class ServerStream(Struct, frozen=True):
    """One message in, many out. The handler keeps the deadline itself."""

    request: type[Struct]
    handler: Callable[[Call, Any, Stream], Awaitable[None]]


class ClientStream(Struct, frozen=True):
    """Many messages in, one out."""

    request: type[Struct]
    handler: Callable[[Call, AsyncIterator[Any]], Awaitable[Struct]]


Method = Unary | ServerStream | ClientStream


async def serve(exchange: Exchange, method: Method) -> None:
    """Answer one call."""
    if exchange.method != "POST":
        exchange.respond(405, headers=[("Allow", "POST")])
        return
    content_type = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    codec = (_UNARY if isinstance(method, Unary) else _STREAM).get(content_type)
    if codec is None:
        accepted = ", ".join(_UNARY if isinstance(method, Unary) else _STREAM)
        exchange.respond(415, headers=[("Accept-Post", accepted)])
        return
    if isinstance(method, Unary):
        await _serve_unary(exchange, method, codec)
    else:
        await _serve_stream(exchange, method, codec)


def respond_error(exchange: Exchange, error: ConnectError) -> None:
    """Answer a unary call with an error."""
    exchange.respond(
        STATUS[error.code], error.to_json(), headers=[("Content-Type", "application/json")]
    )


async def _serve_unary(exchange: Exchange, method: Unary, codec: Codec) -> None:
    try:
        call = Call(exchange)
        body = await exchange.body.read(MAX_MESSAGE)
        encoding = exchange.headers.get("content-encoding", "identity").lower()
        request = _decode(body, encoding, method.request, codec)
        if call.timeout is None:
            answer = await method.handler(call, request)
        else:
            async with asyncio.timeout(call.timeout):
                answer = await method.handler(call, request)
    except ConnectError as error:
        respond_error(exchange, error)
    except BodyTooLargeError as error:
        respond_error(exchange, ConnectError(Code.RESOURCE_EXHAUSTED, str(error)))
    except TimeoutError:
        respond_error(exchange, ConnectError(Code.DEADLINE_EXCEEDED, "the deadline has passed"))
    except ClientGoneError:
        raise
    except Exception as error:
        log.exception("call failed", extra={"path": exchange.path})
        respond_error(exchange, ConnectError(Code.INTERNAL, f"internal error: {error}"))
    else:
        exchange.respond(200, codec.encode(answer), headers=[("Content-Type", codec.unary_type)])


async def _serve_stream(
    exchange: Exchange, method: ServerStream | ClientStream, codec: Codec
) -> None:
    """Errors of a stream travel in its end frame, after status 200."""
    stream = Stream(exchange, codec)
    end = b"{}"
    try:
        call = Call(exchange)
        if isinstance(method, ServerStream):
            request = await _first(exchange, method.request, codec)
            await method.handler(call, request, stream)
        else:
            messages = _incoming(exchange, method.request, codec)
            async with asyncio.timeout(call.timeout):
                answer = await method.handler(call, messages)
            await stream.send(answer, is_last=True)
    except ConnectError as error:
        end = b'{"error":%b}' % error.to_json()
    except TimeoutError:
        late = ConnectError(Code.DEADLINE_EXCEEDED, "the deadline has passed")
        end = b'{"error":%b}' % late.to_json()
    except ClientGoneError:
        raise
    except Exception as error:
        log.exception("stream failed", extra={"path": exchange.path})
        end = b'{"error":%b}' % ConnectError(Code.INTERNAL, f"internal error: {error}").to_json()
    await stream.end(end)


def _decode(body: bytes, encoding: str, kind: type[Struct], codec: Codec) -> Struct:
    if encoding == "gzip":
        body = inflate(body)
    elif encoding != "identity":
        raise ConnectError(
            Code.UNIMPLEMENTED, f"compression {encoding!r} is not supported: use gzip or identity"
        )
    try:
        return codec.decode(body, kind)
    except proto.DecodeError as error:
        raise ConnectError(Code.INVALID_ARGUMENT, f"cannot read the request: {error}") from error


async def _incoming(exchange: Exchange, kind: type[Struct], codec: Codec) -> AsyncIterator[Struct]:
    encoding = exchange.headers.get("connect-content-encoding", "identity").lower()
    reader = EnvelopeReader()
    async for piece in exchange.body:
        for flags, payload in reader.feed(piece):
            if flags & _END:
                return
            yield _decode(payload, encoding if flags & _COMPRESSED else "identity", kind, codec)
    if not reader.is_empty:
        raise ConnectError(Code.INVALID_ARGUMENT, "the request stream ends inside a message")


async def _first(exchange: Exchange, kind: type[Struct], codec: Codec) -> Struct:
    """Read the one message of a server stream, without waiting for the body's end."""
    encoding = exchange.headers.get("connect-content-encoding", "identity").lower()
    reader = EnvelopeReader()
    while piece := await exchange.body.chunk():
        for flags, payload in reader.feed(piece):
            return _decode(payload, encoding if flags & _COMPRESSED else "identity", kind, codec)
    raise ConnectError(Code.INVALID_ARGUMENT, "expected one message, got none")
