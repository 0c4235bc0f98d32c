"""The encoding of the Connect protocol: error codes, codecs (JSON and protobuf), envelopes.

Calls are served in `connect.py`.
"""

import struct
import zlib
from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct

from paddock.envd.rpc import proto
from paddock.envd.rpc.messages import FIELDS, WatcherId, WatchRequest

MAX_MESSAGE = 64 << 20
COMPRESSED, END = 1, 2
"""Flags of an envelope."""
_HEAD = struct.Struct(">BI")
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
    """An error with a Connect code; the message is sent to the client."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def to_json(self) -> bytes:
        """Encode the error as the protocol demands."""
        return msgspec.json.encode({"code": self.code.value, "message": printable(self.message)})


def printable(text: str) -> str:
    """Return text as valid Unicode: file names in a sandbox are arbitrary bytes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class JsonCodec:
    """Encodes messages as proto3 JSON."""

    unary_type = "application/json"
    stream_type = "application/connect+json"

    def encode(self, message: Struct) -> bytes:
        return msgspec.json.encode(message)

    def decode(self, data: bytes, kind: type[Struct]) -> Struct:
        """Decode a message; spellings other than the canonical one take a slower path."""
        if kind not in _SNAKE_PRONE:
            try:
                return msgspec.json.decode(data or b"{}", type=kind)
            except msgspec.ValidationError:
                pass
            except (msgspec.DecodeError, RecursionError) as error:
                raise proto.DecodeError(str(error)) from error
        return proto.from_json(data or b"{}", kind, FIELDS)


class BinaryCodec:
    """Encodes messages as protobuf binary."""

    unary_type = "application/proto"
    stream_type = "application/connect+proto"

    def encode(self, message: Struct) -> bytes:
        return proto.encode(message, FIELDS)

    def decode(self, data: bytes, kind: type[Struct]) -> Struct:
        return proto.decode(data, kind, FIELDS)


Codec = JsonCodec | BinaryCodec
_CODECS = (JsonCodec(), BinaryCodec())
UNARY: Mapping[str, Codec] = {codec.unary_type: codec for codec in _CODECS}
STREAM: Mapping[str, Codec] = {codec.stream_type: codec for codec in _CODECS}


def envelope(payload: bytes, flags: int = 0) -> bytes:
    """Return a message of a stream in its envelope."""
    return _HEAD.pack(flags, len(payload)) + payload


class EnvelopeReader:
    """Splits a byte stream into envelopes."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return flags and payload of the envelopes that these bytes complete."""
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
        """Whether no envelope is incomplete."""
        return not self._buffer


def inflate(data: bytes, limit: int = MAX_MESSAGE) -> bytes:
    """Decompress a gzip message of at most `limit` bytes."""
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
