"""A small table-driven proto3 codec: structs to and from protobuf binary and lenient JSON.

Knows no message by name: tables of `Field` come from `messages`. The usual JSON path does not
pass here (msgspec decodes it directly); `from_json` is the slow, forgiving reading that proto3
asks for: snake_case names, nulls, numeric enums, int64 as strings, url-safe base64.
"""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec import Struct

Kind = Literal["varint", "zigzag", "bool", "string", "bytes", "enum", "map", "timestamp", "message"]
Tables = Mapping[type[Struct], "tuple[Field, ...]"]

_WIRE: Mapping[str, int] = {"varint": 0, "zigzag": 0, "bool": 0, "enum": 0}
_DEPTH_LIMIT = 32
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class DecodeError(ValueError):
    """The bytes are not such a message."""


class Field(NamedTuple):
    """One row of a message's table."""

    number: int
    name: str
    kind: Kind
    message: type[Struct] | None
    repeated: bool
    optional: bool
    enum: Mapping[StrEnum, int] | None


def field(
    number: int,
    name: str,
    kind: Kind | type[Struct],
    *,
    repeated: bool = False,
    optional: bool = False,
    enum: Mapping[Any, int] | None = None,
) -> Field:
    """One row; a struct as `kind` means a nested message (which is always optional)."""
    if isinstance(kind, str):
        return Field(number, name, kind, None, repeated, optional, enum)
    return Field(number, name, "message", kind, repeated, optional or not repeated, enum)


# -- binary, writing ---------------------------------------------------------------------------


def encode(message: Struct, tables: Tables) -> bytes:
    """The message in protobuf binary, fields in order of number."""
    out = bytearray()
    for row in tables[type(message)]:
        value = getattr(message, row.name)
        if value is None or (not row.optional and _is_default(value, row)):
            continue
        if row.kind == "map":
            for key, item in value.items():
                entry = _delimited(1, key.encode()) + _delimited(2, item.encode())
                out += _delimited(row.number, entry)
        elif row.repeated:
            for item in value:
                out += _encode_one(row, item, tables)
        else:
            out += _encode_one(row, value, tables)
    return bytes(out)


def _is_default(value: Any, row: Field) -> bool:
    if row.enum is not None:
        return row.enum[value] == 0
    return not value


def _encode_one(row: Field, value: Any, tables: Tables) -> bytes:
    if row.kind in _WIRE:
        if row.enum is not None:
            number = row.enum[value]
        elif row.kind == "zigzag":
            number = value * 2 if value >= 0 else -value * 2 - 1
        else:
            number = int(value)
        return _varint(row.number << 3) + _varint(number)
    if row.kind == "string":
        payload = value.encode()
    elif row.kind == "bytes":
        payload = value
    elif row.kind == "timestamp":
        payload = _encode_timestamp(value)
    else:
        payload = encode(value, tables)
    return _delimited(row.number, payload)


def _encode_timestamp(value: datetime) -> bytes:
    since = value - _EPOCH
    seconds = since.days * 86400 + since.seconds
    out = b""
    if seconds:
        out += b"\x08" + _varint(seconds)
    if since.microseconds:
        out += b"\x10" + _varint(since.microseconds * 1000)
    return out


def _varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


# -- binary, reading ---------------------------------------------------------------------------


def decode(data: bytes, kind: type[Struct], tables: Tables) -> Struct:
    """Read a message; unknown fields are skipped, a later value of a field wins."""
    return _decode(memoryview(data), kind, tables, depth=0)


def _decode(data: memoryview, kind: type[Struct], tables: Tables, *, depth: int) -> Struct:
    if depth > _DEPTH_LIMIT:
        raise DecodeError("message is nested too deeply")
    rows = {row.number: row for row in tables[kind]}
    values: dict[str, Any] = {}
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        raw, position = _read_value(data, position, key & 7)
        row = rows.get(key >> 3)
        if row is None:
            continue
        if isinstance(raw, int) != (row.kind in _WIRE):
            raise DecodeError(f"field {row.name} of {kind.__name__} has the wrong wire type")
        _store(values, row, raw, tables, depth=depth)
    for row in rows.values():
        if row.repeated and row.name in values:
            values[row.name] = tuple(values[row.name])
    return kind(**values)


def _store(
    values: dict[str, Any],
    row: Field,
    raw: "int | memoryview",
    tables: Tables,
    *,
    depth: int,
) -> None:
    if row.kind == "map":
        key, value = _decode_entry(cast(memoryview, raw))
        values.setdefault(row.name, {})[key] = value
        return
    value = _decode_one(row, raw, tables, depth=depth)
    if row.repeated:
        values.setdefault(row.name, []).append(value)
    else:
        values[row.name] = value


def _decode_one(row: Field, raw: "int | memoryview", tables: Tables, *, depth: int) -> Any:
    if isinstance(raw, int):
        return _decode_number(row, raw)
    if row.kind == "string":
        return _text(raw)
    if row.kind == "bytes":
        return bytes(raw)
    if row.kind == "timestamp":
        return _decode_timestamp(raw)
    return _decode(raw, cast(type[Struct], row.message), tables, depth=depth + 1)


def _decode_number(row: Field, raw: int) -> Any:
    if row.enum is not None:
        for name, number in row.enum.items():
            if number == raw:
                return name
        return next(iter(row.enum))
    if row.kind == "bool":
        return raw != 0
    if row.kind == "zigzag":
        return raw >> 1 ^ -(raw & 1)
    return raw - (1 << 64) if raw >= 1 << 63 else raw


def _decode_entry(data: memoryview) -> tuple[str, str]:
    key = value = ""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        raw, position = _read_value(data, position, tag & 7)
        if isinstance(raw, int) or tag >> 3 not in (1, 2):
            continue
        if tag >> 3 == 1:
            key = _text(raw)
        else:
            value = _text(raw)
    return key, value


def _decode_timestamp(data: memoryview) -> datetime:
    seconds = nanos = 0
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        raw, position = _read_value(data, position, tag & 7)
        if not isinstance(raw, int):
            continue
        signed = raw - (1 << 64) if raw >= 1 << 63 else raw
        if tag >> 3 == 1:
            seconds = signed
        elif tag >> 3 == 2:
            nanos = signed
    try:
        return _EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000)
    except OverflowError as error:
        raise DecodeError("timestamp out of range") from error


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise DecodeError("truncated or oversized varint")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7


def _read_value(data: memoryview, position: int, wire: int) -> "tuple[int | memoryview, int]":
    if wire == 0:
        return _read_varint(data, position)
    if wire == 2:
        length, position = _read_varint(data, position)
    elif wire in (1, 5):
        length = 8 if wire == 1 else 4
    else:
        raise DecodeError(f"unsupported wire type {wire}")
    if position + length > len(data):
        raise DecodeError("truncated field")
    return data[position : position + length], position + length


def _text(raw: memoryview) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError("string field is not UTF-8") from error


# -- forgiving JSON ----------------------------------------------------------------------------


def from_json(data: bytes, kind: type[Struct], tables: Tables) -> Struct:
    """Read proto3 JSON in every spelling the specification allows."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DecodeError(str(error)) from error
    return _from_object(value, kind, tables, depth=0)


def _from_object(value: Any, kind: type[Struct], tables: Tables, *, depth: int) -> Struct:
    if not isinstance(value, dict) or depth > _DEPTH_LIMIT:
        raise DecodeError(f"expected an object for {kind.__name__}")
    source = cast(dict[str, Any], value)
    values: dict[str, Any] = {}
    for row in tables[kind]:
        raw = source.get(_camel(row.name))
        if raw is None:
            raw = source.get(row.name)
        if raw is None:
            continue
        if row.repeated:
            if not isinstance(raw, list):
                raise DecodeError(f"expected a list for {row.name}")
            items = cast(list[Any], raw)
            values[row.name] = tuple(_scalar(item, row, tables, depth=depth) for item in items)
        else:
            values[row.name] = _scalar(raw, row, tables, depth=depth)
    return kind(**values)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


def _scalar(raw: Any, row: Field, tables: Tables, *, depth: int) -> Any:
    if row.message is not None:
        return _from_object(raw, row.message, tables, depth=depth + 1)
    if row.enum is not None:
        return _enum(raw, row.enum)
    if row.kind == "bytes":
        return _unbase64(raw)
    target = {"varint": int, "zigzag": int, "bool": bool, "string": str, "timestamp": datetime}
    wanted: Any = dict[str, str] if row.kind == "map" else target[row.kind]
    is_number = wanted is int
    try:
        return msgspec.convert(raw, wanted, strict=not is_number)
    except msgspec.ValidationError as error:
        raise DecodeError(f"{row.name}: {error}") from error


def _enum(raw: Any, enum: Mapping[StrEnum, int]) -> StrEnum:
    for name, number in enum.items():
        if raw == name.value or (isinstance(raw, int) and raw == number):
            return name
    raise DecodeError(f"unknown value {raw!r}")


def _unbase64(raw: Any) -> bytes:
    if not isinstance(raw, str):
        raise DecodeError("bytes must be a base64 string")
    text = raw.translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError("bytes are not valid base64") from error
