"""The Connect protocol over HTTP/1.1: unary, server-streaming and client-streaming calls.

Handles deadlines, errors and end-of-stream frames. Encoding is in `connect_frames.py`, methods are
in the services, authorization is in `envd/server.py`.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from msgspec import Struct

from paddock.envd.http.request import BodyTooLargeError, ClientGoneError, HttpRequest
from paddock.envd.rpc import proto
from paddock.envd.rpc.connect_frames import (
    COMPRESSED,
    END,
    MAX_MESSAGE,
    STATUS,
    STREAM,
    UNARY,
    Code,
    Codec,
    ConnectError,
    EnvelopeReader,
    envelope,
    inflate,
)

log = logging.getLogger(__name__)

DEFAULT_KEEPALIVE_SECONDS = 90.0


class RpcCall:
    """The metadata of a call: user, deadline, keepalive."""

    def __init__(self, request: HttpRequest) -> None:
        self._headers = request.headers
        self.timeout = self._read_timeout()
        """The client's deadline in seconds, or `None`."""

    @property
    def username(self) -> str | None:
        """The user in the Basic authorization, or `None` for the default user."""
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
        """The longest time without a message on a stream."""
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

    def __init__(self, request: HttpRequest, codec: Codec) -> None:
        self._request = request
        self._codec = codec
        self._kept = b""

    async def send(self, *messages: Struct, is_last: bool = False) -> None:
        """Send messages; wait while the client is slow. The last ones leave with the end frame."""
        data = b"".join(envelope(self._codec.encode(m)) for m in messages)
        if is_last:
            self._kept = data
        else:
            await self._write(data)

    async def end(self, payload: bytes) -> None:
        """Send the end frame."""
        await self._write(self._kept + envelope(payload, END), is_last=True)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        # Only with the first message: some clients stop sending the request when the response
        # begins.
        if not self._request.is_started:
            self._request.start(200, [("Content-Type", self._codec.stream_type)])
        await self._request.write(data, is_last=is_last)


class Unary(Struct, frozen=True):
    """A method with one request and one response message."""

    message_type: type[Struct]
    handler: Callable[[RpcCall, Any], Awaitable[Struct]]


class ServerStream(Struct, frozen=True):
    """A method with one request message and a stream of responses; enforces its own deadline."""

    message_type: type[Struct]
    handler: Callable[[RpcCall, Any, Stream], Awaitable[None]]


class ClientStream(Struct, frozen=True):
    """A method with a stream of requests and one response message."""

    message_type: type[Struct]
    handler: Callable[[RpcCall, AsyncIterator[Any]], Awaitable[Struct]]


Method = Unary | ServerStream | ClientStream


async def serve(request: HttpRequest, method: Method) -> None:
    """Serve one call."""
    if request.method != "POST":
        request.respond(405, headers=[("Allow", "POST")])
        return
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    codec = (UNARY if isinstance(method, Unary) else STREAM).get(content_type)
    if codec is None:
        accepted = ", ".join(UNARY if isinstance(method, Unary) else STREAM)
        request.respond(415, headers=[("Accept-Post", accepted)])
        return
    if isinstance(method, Unary):
        await _serve_unary(request, method, codec)
    else:
        await _serve_stream(request, method, codec)


def respond_error(request: HttpRequest, error: ConnectError) -> None:
    """Send an error as the response of a unary call."""
    request.respond(
        STATUS[error.code], error.to_json(), headers=[("Content-Type", "application/json")]
    )


async def _serve_unary(request: HttpRequest, method: Unary, codec: Codec) -> None:
    try:
        call = RpcCall(request)
        body = await request.body.read(MAX_MESSAGE)
        encoding = request.headers.get("content-encoding", "identity").lower()
        message = _decode(body, encoding, method.message_type, codec)
        if call.timeout is None:
            response = await method.handler(call, message)
        else:
            async with asyncio.timeout(call.timeout):
                response = await method.handler(call, message)
    except ConnectError as error:
        respond_error(request, error)
    except BodyTooLargeError as error:
        respond_error(request, ConnectError(Code.RESOURCE_EXHAUSTED, str(error)))
    except TimeoutError:
        respond_error(request, ConnectError(Code.DEADLINE_EXCEEDED, "the deadline has passed"))
    except ClientGoneError:
        raise
    except Exception as error:
        log.exception("call failed", extra={"path": request.path})
        respond_error(request, ConnectError(Code.INTERNAL, f"internal error: {error}"))
    else:
        request.respond(200, codec.encode(response), headers=[("Content-Type", codec.unary_type)])


async def _serve_stream(
    request: HttpRequest, method: ServerStream | ClientStream, codec: Codec
) -> None:
    """Serve a stream; errors are sent in the end frame, after status 200."""
    stream = Stream(request, codec)
    end = b"{}"
    try:
        call = RpcCall(request)
        if isinstance(method, ServerStream):
            message = await _first(request, method.message_type, codec)
            await method.handler(call, message, stream)
        else:
            messages = _incoming(request, method.message_type, codec)
            async with asyncio.timeout(call.timeout):
                response = await method.handler(call, messages)
            await stream.send(response, is_last=True)
    except ConnectError as error:
        end = b'{"error":%b}' % error.to_json()
    except TimeoutError:
        late = ConnectError(Code.DEADLINE_EXCEEDED, "the deadline has passed")
        end = b'{"error":%b}' % late.to_json()
    except ClientGoneError:
        raise
    except Exception as error:
        log.exception("stream failed", extra={"path": request.path})
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


async def _incoming(
    request: HttpRequest, kind: type[Struct], codec: Codec
) -> AsyncIterator[Struct]:
    encoding = request.headers.get("connect-content-encoding", "identity").lower()
    reader = EnvelopeReader()
    async for piece in request.body:
        for flags, payload in reader.feed(piece):
            if flags & END:
                return
            yield _decode(payload, encoding if flags & COMPRESSED else "identity", kind, codec)
    if not reader.is_empty:
        raise ConnectError(Code.INVALID_ARGUMENT, "the request stream ends inside a message")


async def _first(request: HttpRequest, kind: type[Struct], codec: Codec) -> Struct:
    """Return the first message of a server stream, without waiting for the end of the body."""
    encoding = request.headers.get("connect-content-encoding", "identity").lower()
    reader = EnvelopeReader()
    while piece := await request.body.chunk():
        for flags, payload in reader.feed(piece):
            return _decode(payload, encoding if flags & COMPRESSED else "identity", kind, codec)
    raise ConnectError(Code.INVALID_ARGUMENT, "expected one message, got none")
