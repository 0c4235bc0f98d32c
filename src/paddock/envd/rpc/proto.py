"""A table-driven proto3 codec: structs to and from protobuf binary, and from lenient JSON.

The tables of `Field` are in `messages.py`, the wire format is in `wire/protobuf.py`. Ordinary JSON
is decoded by msgspec directly; `from_json` is the slow path for the other spellings that proto3
allows: snake_case names, nulls, numeric enums, int64 as strings, url-safe base64.
"""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec import Struct

from paddock.wire.protobuf import (
    LEN,
    VARINT,
    ProtobufError,
    decode_text,
    len_field,
    read_fields,
    signed,
    varint_field,
)

Kind = Literal["varint", "zigzag", "bool", "string", "bytes", "enum", "map", "timestamp", "message"]
Tables = Mapping[type[Struct], "tuple[Field, ...]"]

_VARINT_KINDS = frozenset(("varint", "zigzag", "bool", "enum"))
_DEPTH_LIMIT = 32
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class DecodeError(ValueError):
    """The input is not a message of the expected type."""


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
    """Return a row; a struct as `kind` means a nested message, which is always optional."""
    if isinstance(kind, str):
        return Field(number, name, kind, None, repeated, optional, enum)
    return Field(number, name, "message", kind, repeated, optional or not repeated, enum)


# -- binary, writing ---------------------------------------------------------------------------


def encode(message: Struct, tables: Tables) -> bytes:
    """Encode a message as protobuf binary, fields in the order of the table."""
    out = bytearray()
    for row in tables[type(message)]:
        value = getattr(message, row.name)
        if value is None or (not row.optional and _is_default(value, row)):
            continue
        if row.kind == "map":
            for key, item in value.items():
                entry = len_field(1, key.encode()) + len_field(2, item.encode())
                out += len_field(row.number, entry)
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
    if row.kind in _VARINT_KINDS:
        if row.enum is not None:
            number = row.enum[value]
        elif row.kind == "zigzag":
            number = value * 2 if value >= 0 else -value * 2 - 1
        else:
            number = int(value)
        return varint_field(row.number, number)
    if row.kind == "string":
        payload = value.encode()
    elif row.kind == "bytes":
        payload = value
    elif row.kind == "timestamp":
        payload = _encode_timestamp(value)
    else:
        payload = encode(value, tables)
    return len_field(row.number, payload)


def _encode_timestamp(value: datetime) -> bytes:
    since = value - _EPOCH
    seconds = since.days * 86400 + since.seconds
    out = b""
    if seconds:
        out += varint_field(1, seconds)
    if since.microseconds:
        out += varint_field(2, since.microseconds * 1000)
    return out


# -- binary, reading ---------------------------------------------------------------------------


def decode(data: bytes, kind: type[Struct], tables: Tables) -> Struct:
    """Decode a message; unknown fields are skipped, the last value of a field counts."""
    try:
        return _decode(memoryview(data), kind, tables, depth=0)
    except ProtobufError as error:
        raise DecodeError(str(error)) from error


def _decode(data: memoryview, kind: type[Struct], tables: Tables, *, depth: int) -> Struct:
    if depth > _DEPTH_LIMIT:
        raise DecodeError("message is nested too deeply")
    rows = {row.number: row for row in tables[kind]}
    values: dict[str, Any] = {}
    for number, wire_type, raw in read_fields(data):
        row = rows.get(number)
        if row is None:
            continue
        if wire_type != (VARINT if row.kind in _VARINT_KINDS else LEN):
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
        return decode_text(raw)
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
    return signed(raw)


def _decode_entry(data: memoryview) -> tuple[str, str]:
    key = value = ""
    for number, _, raw in read_fields(data):
        if isinstance(raw, int):
            continue
        if number == 1:
            key = decode_text(raw)
        elif number == 2:
            value = decode_text(raw)
    return key, value


def _decode_timestamp(data: memoryview) -> datetime:
    seconds = nanos = 0
    for number, _, raw in read_fields(data):
        if not isinstance(raw, int):
            continue
        if number == 1:
            seconds = signed(raw)
        elif number == 2:
            nanos = signed(raw)
    try:
        return _EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000)
    except OverflowError as error:
        raise DecodeError("timestamp out of range") from error


# -- lenient JSON ------------------------------------------------------------------------------


def from_json(data: bytes, kind: type[Struct], tables: Tables) -> Struct:
    """Decode proto3 JSON in every spelling that the specification allows."""
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
