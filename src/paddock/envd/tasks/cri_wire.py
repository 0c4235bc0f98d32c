"""The little of protobuf's wire format that a CRI client needs: encoding and reading messages.

A message to send is a mapping from field number to value; one received is read into lists by
field number. Strings, messages, booleans, whole numbers and maps of strings: CRI needs no more.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while True:
        byte = number & 0x7F
        number >>= 7
        if not number:
            out.append(byte)
            return bytes(out)
        out.append(byte | 0x80)


def _field(number: int, value: Any) -> bytes:
    if isinstance(value, (bool, int)):
        return _varint(number << 3) + _varint(int(value)) if value else b""
    if isinstance(value, str):
        data = value.encode()
    elif isinstance(value, Mapping):
        data = message(cast("Mapping[int, Any]", value))
    else:
        data = bytes(value)
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def message(fields: Mapping[int, Any]) -> bytes:
    """Encode a message; lists are repeated fields, empty values are left out."""
    out = bytearray()
    for number, value in fields.items():
        if isinstance(value, (list, tuple)):
            for item in cast("Sequence[Any]", value):
                out += _field(number, item)
        elif value is not None and value != "":
            out += _field(number, value)
    return bytes(out)


def pairs(values: Mapping[str, str]) -> list[Mapping[int, str]]:
    """Give a map of strings as the repeated entries it is on the wire."""
    return [{1: key, 2: value} for key, value in values.items()]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return number, at
        shift += 7


def read(data: bytes) -> dict[int, list[Any]]:
    """Read a message: numbers as they are, everything else as bytes."""
    found: dict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            found[number].append(value)
        elif kind == 2:
            size, at = _read_varint(data, at)
            found[number].append(data[at : at + size])
            at += size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            found[number].append(data[at : at + size])
            at += size
        else:
            raise ValueError(f"field {number} has the unknown wire type {kind}")
    return found


def text(found: Mapping[int, list[Any]], number: int) -> str:
    """Give a string field."""
    values = found.get(number)
    return values[-1].decode() if values else ""


def whole(found: Mapping[int, list[Any]], number: int) -> int:
    """Give a whole number, signed as int32 and int64 are."""
    values = found.get(number)
    value = int(values[-1]) if values else 0
    return value - (1 << 64) if value >= 1 << 63 else value
