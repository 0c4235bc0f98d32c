"""Bodies in Kubernetes' protobuf, which newer clients send for Kubernetes' own kinds.

Only what such clients write here is read: namespaces, secrets and the options of a deletion.
What is decoded looks as it would in JSON, and is checked like it afterwards. Answers are JSON,
which the same clients accept. Field numbers are those of Kubernetes' public definitions.
"""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct

from paddock.api.kube.status import BadRequestError, UnsupportedMediaTypeError

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_MAX_DEPTH = 16


class _Field(Struct, frozen=True):
    """How one field is read."""

    name: str
    kind: Any
    """`text`, `number`, `flag`, `bytes`, `time`, or the fields of a message."""
    is_repeated: bool = False
    is_map: bool = False


_Message = Mapping[int, _Field]

_OWNER: _Message = {
    1: _Field("kind", "text"),
    3: _Field("name", "text"),
    4: _Field("uid", "text"),
    5: _Field("apiVersion", "text"),
    6: _Field("controller", "flag"),
    7: _Field("blockOwnerDeletion", "flag"),
}
_META: _Message = {
    1: _Field("name", "text"),
    2: _Field("generateName", "text"),
    3: _Field("namespace", "text"),
    5: _Field("uid", "text"),
    6: _Field("resourceVersion", "text"),
    7: _Field("generation", "number"),
    8: _Field("creationTimestamp", "time"),
    9: _Field("deletionTimestamp", "time"),
    10: _Field("deletionGracePeriodSeconds", "number"),
    11: _Field("labels", "text", is_map=True),
    12: _Field("annotations", "text", is_map=True),
    13: _Field("ownerReferences", _OWNER, is_repeated=True),
    14: _Field("finalizers", "text", is_repeated=True),
}
_KINDS: Mapping[tuple[str, str], _Message] = {
    ("v1", "Namespace"): {
        1: _Field("metadata", _META),
        3: _Field("status", {1: _Field("phase", "text")}),
    },
    ("v1", "Secret"): {
        1: _Field("metadata", _META),
        2: _Field("data", "bytes", is_map=True),
        3: _Field("type", "text"),
        4: _Field("stringData", "text", is_map=True),
    },
    ("", "DeleteOptions"): {
        1: _Field("gracePeriodSeconds", "number"),
        2: _Field(
            "preconditions", {1: _Field("uid", "text"), 2: _Field("resourceVersion", "text")}
        ),
        3: _Field("orphanDependents", "flag"),
        4: _Field("propagationPolicy", "text"),
        5: _Field("dryRun", "text", is_repeated=True),
    },
}
_ENVELOPE: _Message = {
    1: _Field("type", {1: _Field("apiVersion", "text"), 2: _Field("kind", "text")}),
    2: _Field("raw", "raw"),
}


def decode(data: bytes) -> dict[str, Any]:
    """Read a body; what is not protobuf of a known kind is refused."""
    if not data.startswith(_MAGIC):
        raise BadRequestError("the body is not Kubernetes' protobuf")
    try:
        envelope = _decode(memoryview(data)[len(_MAGIC) :], _ENVELOPE, _MAX_DEPTH)
        kind = envelope.get("type", {})
        version, name = kind.get("apiVersion", ""), kind.get("kind", "")
        message = _KINDS.get(("" if name == "DeleteOptions" else version, name))
        if message is None:
            raise UnsupportedMediaTypeError(
                f"{name[:80]!r} is not read as protobuf", hint="send application/json"
            )
        body = _decode(memoryview(envelope.get("raw", b"")), message, _MAX_DEPTH)
    except (ValueError, IndexError, OverflowError) as error:
        raise BadRequestError(f"the body is not Kubernetes' protobuf: {error}") from error
    return {"apiVersion": version, "kind": name, **body}


def _decode(data: memoryview, message: _Message, depth: int) -> dict[str, Any]:
    if depth == 0:
        raise ValueError("too deep")
    found: dict[str, Any] = {}
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        value, position = _raw(data, position, tag & 7)
        field = message.get(tag >> 3)
        if field is None:
            continue
        if field.is_map:
            entry = {1: _Field("key", "text"), 2: _Field("value", field.kind)}
            pair = _decode(_as_bytes(value), entry, depth - 1)
            found.setdefault(field.name, {})[pair.get("key", "")] = pair.get("value", "")
        elif field.is_repeated:
            found.setdefault(field.name, []).append(_value(value, field.kind, depth))
        else:
            found[field.name] = _value(value, field.kind, depth)
    return found


def _value(value: memoryview | int, kind: Any, depth: int) -> Any:
    if kind == "number":
        return _as_number(value)
    if kind == "flag":
        return bool(_as_number(value))
    data = _as_bytes(value)
    if kind == "text":
        return bytes(data).decode()
    if kind == "bytes":
        return base64.b64encode(data).decode()
    if kind == "raw":
        return bytes(data)
    if kind == "time":
        return _moment(_decode(data, {1: _Field("seconds", "number")}, depth - 1))
    return _decode(data, kind, depth - 1)


def _moment(parts: dict[str, Any]) -> str | None:
    seconds = parts.get("seconds")
    if not seconds:
        return None
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat()


def _as_bytes(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where text was expected")  # noqa: TRY004 - about data, not types
    return value


def _as_number(value: memoryview | int) -> int:
    if not isinstance(value, int):
        raise ValueError("text where a number was expected")  # noqa: TRY004 - about data, not types
    return value - (1 << 64) if value >> 63 else value


def _raw(data: memoryview, position: int, wire: int) -> tuple[memoryview | int, int]:
    if wire == 0:
        return _varint(data, position)
    if wire == 2:
        size, position = _varint(data, position)
    elif wire in (1, 5):
        size = 8 if wire == 1 else 4
    else:
        raise ValueError(f"wire type {wire}")
    if position + size > len(data):
        raise ValueError("cut short")
    return data[position : position + size], position + size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
    raise ValueError("a number too long")
