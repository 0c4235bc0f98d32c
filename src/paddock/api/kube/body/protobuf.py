"""Kubernetes protobuf bodies, which newer clients send for Kubernetes' own kinds.

Only the types that such clients send are supported: Namespace, Secret, DeleteOptions and reviews of
the caller's own access. The result looks like decoded JSON and is validated in the same way.
Responses are JSON, which the same clients accept. Field numbers are those of Kubernetes' public
definitions.
"""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from msgspec import Struct

from paddock.api.kube.status import BadRequestError, UnsupportedMediaTypeError
from paddock.wire.protobuf import LEN, VARINT, ProtobufError, decode_text, read_fields, signed

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_MAX_DEPTH = 16
_VARINT_KINDS = ("number", "flag")


class _Field(Struct, frozen=True):
    """Name and type of one field."""

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
_RESOURCE: _Message = {
    1: _Field("namespace", "text"),
    2: _Field("verb", "text"),
    3: _Field("group", "text"),
    4: _Field("version", "text"),
    5: _Field("resource", "text"),
    6: _Field("subresource", "text"),
    7: _Field("name", "text"),
}
_NON_RESOURCE: _Message = {1: _Field("path", "text"), 2: _Field("verb", "text")}
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
    ("authorization.k8s.io/v1", "SelfSubjectAccessReview"): {
        1: _Field("metadata", _META),
        2: _Field(
            "spec",
            {
                1: _Field("resourceAttributes", _RESOURCE),
                2: _Field("nonResourceAttributes", _NON_RESOURCE),
            },
        ),
    },
    ("authorization.k8s.io/v1", "SelfSubjectRulesReview"): {
        1: _Field("metadata", _META),
        2: _Field("spec", {1: _Field("namespace", "text")}),
    },
    ("authentication.k8s.io/v1", "SelfSubjectReview"): {1: _Field("metadata", _META)},
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
    """Decode a body; raises if it is not protobuf of a supported type."""
    if not data.startswith(_MAGIC):
        raise BadRequestError("the body is not Kubernetes' protobuf")
    try:
        envelope = _decode(memoryview(data)[len(_MAGIC) :], _ENVELOPE, _MAX_DEPTH)
        kind = envelope.get("type", {})
        version, name = kind.get("apiVersion", ""), kind.get("kind", "")
        message = _KINDS.get(("" if name == "DeleteOptions" else version, name))
        if message is None:
            raise UnsupportedMediaTypeError(
                f"{name[:80]!r} is not supported as protobuf", hint="send application/json"
            )
        body = _decode(memoryview(envelope.get("raw", b"")), message, _MAX_DEPTH)
    except (ProtobufError, OverflowError) as error:
        raise BadRequestError(f"the body is not Kubernetes' protobuf: {error}") from error
    return {"apiVersion": version, "kind": name, **body}


def _decode(data: memoryview, message: _Message, depth: int) -> dict[str, Any]:
    if depth == 0:
        raise ProtobufError("message is nested too deeply")
    found: dict[str, Any] = {}
    for number, wire_type, value in read_fields(data):
        field = message.get(number)
        if field is None:
            continue
        if wire_type != (VARINT if field.kind in _VARINT_KINDS and not field.is_map else LEN):
            raise ProtobufError(f"field {field.name} has the wrong wire type")
        if field.is_map:
            entry = {1: _Field("key", "text"), 2: _Field("value", field.kind)}
            pair = _decode(cast("memoryview", value), entry, depth - 1)
            found.setdefault(field.name, {})[pair.get("key", "")] = pair.get("value", "")
        elif field.is_repeated:
            found.setdefault(field.name, []).append(_value(value, field.kind, depth))
        else:
            found[field.name] = _value(value, field.kind, depth)
    return found


def _value(value: memoryview | int, kind: Any, depth: int) -> Any:
    if isinstance(value, int):
        return bool(value) if kind == "flag" else signed(value)
    if kind == "text":
        return decode_text(value)
    if kind == "bytes":
        return base64.b64encode(value).decode()
    if kind == "raw":
        return bytes(value)
    if kind == "time":
        return _moment(_decode(value, {1: _Field("seconds", "number")}, depth - 1))
    return _decode(value, kind, depth - 1)


def _moment(parts: dict[str, Any]) -> str | None:
    seconds = parts.get("seconds")
    if not seconds:
        return None
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat()
