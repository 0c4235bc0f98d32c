"""Just enough of the protobuf wire format to talk to CRIU and to edit one of its images.

Values are unsigned varints and byte strings; that is all those messages use.
"""

import struct
from collections.abc import Iterable

Field = int | bytes | str
Message = dict[int, list[int | bytes]]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MASK64 = (1 << 64) - 1


def encode(fields: Iterable[tuple[int, Field]]) -> bytes:
    """Encode fields in order; a number may repeat. Negative numbers are those of an int32."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3 | _VARINT) + _varint(value & _MASK64)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | _BYTES) + _varint(len(data)) + data
    return bytes(out)


def decode(data: bytes) -> Message:
    """Decode one level: nested messages stay bytes."""
    message: Message = {}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind, number = key & 7, key >> 3
        value: int | bytes
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            value, at = _take(data, at, size)
        elif kind in (_FIXED32, _FIXED64):
            value, at = _take(data, at, 4 if kind == _FIXED32 else 8)
        else:
            raise ValueError(f"wire type {kind} is not known")
        message.setdefault(number, []).append(value)
    return message


def first_int(message: Message, number: int, default: int = 0) -> int:
    """Give the first number of a field, as the int32 it was."""
    for value in message.get(number, ()):
        if isinstance(value, int):
            return struct.unpack("<i", struct.pack("<I", value & 0xFFFFFFFF))[0]
    return default


def first_bytes(message: Message, number: int) -> bytes | None:
    """Give the first byte string of a field."""
    for value in message.get(number, ()):
        if isinstance(value, bytes):
            return value
    return None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value & _MASK64, at
        shift += 7


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise ValueError("a field is cut off")
    return data[at : at + size], at + size
