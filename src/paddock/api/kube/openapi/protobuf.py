"""OpenAPI 2 in protobuf, the only form that clients before 1.27 read.

Encodes the part of the message `openapi.v2.Document` that such clients use: definitions, and the
kind and options of operations. Field numbers are those of gnostic's public definition.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from paddock.wire.protobuf import fixed64_field, len_field, varint_field


def encode_document(document: dict[str, Any]) -> bytes:
    """Encode a whole document."""
    info = _text(1, document["info"]["title"]) + _text(2, document["info"]["version"])
    paths = b"".join(
        len_field(2, _text(1, path) + len_field(2, _path_item(item)))
        for path, item in document["paths"].items()
    )
    definitions = _named_schemas(document["definitions"])
    return (
        _text(1, document["swagger"])
        + len_field(2, info)
        + len_field(8, paths)
        + len_field(9, definitions)
    )


def encode_schema(schema: dict[str, Any]) -> bytes:
    """Encode one schema; keywords that the binary form lacks are left out."""
    data = b""
    for name, value in schema.items():
        if name in _SCHEMA:
            number, write = _SCHEMA[name]
            data += write(number, value)
        elif name.startswith("x-"):
            data += len_field(31, _named_any(name, value))
    return data


def _path_item(item: dict[str, Any]) -> bytes:
    numbers = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}
    return b"".join(
        len_field(numbers[method], _operation(operation)) for method, operation in item.items()
    )


def _operation(operation: dict[str, Any]) -> bytes:
    parameters = b"".join(
        len_field(8, len_field(1, len_field(2, len_field(3, _query_parameter(parameter)))))
        for parameter in operation["parameters"]
        if parameter["in"] == "query"
    )
    extensions = b"".join(
        len_field(13, _named_any(name, value))
        for name, value in operation.items()
        if name.startswith("x-")
    )
    return parameters + extensions


def _query_parameter(parameter: dict[str, Any]) -> bytes:
    return _text(2, parameter["in"]) + _text(4, parameter["name"]) + _text(6, parameter["type"])


def _named_schemas(schemas: dict[str, Any]) -> bytes:
    return b"".join(
        len_field(1, _text(1, name) + len_field(2, encode_schema(schema)))
        for name, schema in schemas.items()
    )


def _named_any(name: str, value: Any) -> bytes:
    return _text(1, name) + len_field(2, _any(value))


def _any(value: Any) -> bytes:
    # Values are encoded as YAML, of which JSON is a subset.
    return _text(2, msgspec.json.encode(value).decode())


def _texts(number: int, values: Iterable[str]) -> bytes:
    return b"".join(_text(number, value) for value in values)


def _anys(number: int, values: Iterable[Any]) -> bytes:
    return b"".join(len_field(number, _any(value)) for value in values)


def _additional(number: int, value: Any) -> bytes:
    inner = (
        varint_field(2, value) if isinstance(value, bool) else len_field(1, encode_schema(value))
    )
    return len_field(number, inner)


def _text(number: int, value: str) -> bytes:
    return len_field(number, value.encode())


def _double(number: int, value: float) -> bytes:
    return fixed64_field(number, struct.pack("<d", value))


_SCHEMA: dict[str, tuple[int, Callable[[int, Any], bytes]]] = {
    "$ref": (1, _text),
    "format": (2, _text),
    "title": (3, _text),
    "description": (4, _text),
    "default": (5, lambda number, value: len_field(number, _any(value))),
    "maximum": (7, _double),
    "minimum": (9, _double),
    "maxLength": (11, varint_field),
    "minLength": (12, varint_field),
    "pattern": (13, _text),
    "maxItems": (14, varint_field),
    "minItems": (15, varint_field),
    "maxProperties": (17, varint_field),
    "required": (19, _texts),
    "enum": (20, _anys),
    "additionalProperties": (21, _additional),
    "type": (22, lambda number, value: len_field(number, _text(1, value))),
    "items": (23, lambda number, value: len_field(number, len_field(1, encode_schema(value)))),
    "properties": (25, lambda number, value: len_field(number, _named_schemas(value))),
}
