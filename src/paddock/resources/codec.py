"""Encoding and decoding of resources as JSON.

Tolerant decoding is for stored objects and newer clients. Strict decoding is for documents that
users apply: an unknown field is an error with the path of the field.
"""

import re
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, structs

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.meta import R, Resource
from paddock.resources.registry import BY_KIND

_encoder = msgspec.json.Encoder()
_MAX_PROBLEMS = 20


@cache
def decoder(cls: type[R]) -> msgspec.json.Decoder[R]:
    """Return the cached decoder of a kind."""
    return msgspec.json.Decoder(cls)


def typed(obj: R) -> R:
    """Return the object with the apiVersion and kind of its class."""
    if obj.kind == obj.KIND and obj.api_version == obj.API_VERSION:
        return obj
    return structs.replace(obj, kind=obj.KIND, api_version=obj.API_VERSION)


def encode(obj: Resource) -> bytes:
    """Encode a resource as JSON."""
    return _encoder.encode(typed(obj))


def decode(cls: type[R], data: bytes | memoryview) -> R:
    """Decode a resource. Unknown fields are dropped, wrong types raise `InvalidError`."""
    try:
        return decoder(cls).decode(data)
    except msgspec.DecodeError as error:
        raise _invalid(cls, error) from error


@cache
def _status_decoder(cls: type[Resource]) -> msgspec.json.Decoder[Any]:
    field = ("status", get_type_hints(cls)["status"])
    return msgspec.json.Decoder(msgspec.defstruct(f"StatusOf{cls.__name__}", [field], gc=False))


def decode_status(cls: type[Resource], data: bytes) -> Any:
    """Decode only the status of an encoded resource."""
    try:
        return _status_decoder(cls).decode(data).status
    except msgspec.DecodeError as error:
        raise _invalid(cls, error) from error


def to_builtins(value: Any) -> Any:
    """Return plain dicts and lists, as in JSON. Unlike `msgspec.to_builtins`, without tuples."""
    return msgspec.json.decode(_encoder.encode(value))


def from_builtins(cls: type[R], plain: object, *, strict_fields: bool = False) -> R:
    """Build a resource from plain dicts and lists. If strict, unknown fields are rejected."""
    if strict_fields:
        problems = unknown_fields(cls, plain)
        if problems:
            raise InvalidError(
                f"{cls.KIND} has unknown fields: " + "; ".join(str(item) for item in problems),
                problems=problems,
            )
    try:
        return msgspec.convert(plain, cls)
    except msgspec.ValidationError as error:
        raise _invalid(cls, error, plain) from error


def decode_any(plain: Any) -> Resource:
    """Build a resource of the kind that the document names. Unknown fields are rejected."""
    if not isinstance(plain, dict):
        raise InvalidError("a resource must be a mapping with apiVersion, kind, metadata and spec")
    kind: Any = plain.get("kind")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    info = BY_KIND.get(kind) if isinstance(kind, str) else None
    if info is None:
        known = ", ".join(sorted(BY_KIND))
        problem = FieldProblem("kind", f"unknown kind {kind!r}; known kinds: {known}")
        raise InvalidError(str(problem), problems=[problem])
    return from_builtins(info.cls, plain, strict_fields=True)  # pyright: ignore[reportUnknownArgumentType]


def _invalid(cls: type[Resource], error: msgspec.DecodeError, plain: Any = None) -> InvalidError:
    text = str(error)
    message, _, where = text.partition(" - at `")
    path = where.rstrip("`").removeprefix("$").removeprefix(".")
    if _ANY_KEY in path and plain is not None:
        path = _with_keys(cls, plain, path)
    if match := _MISSING.match(message):
        path, message = f"{path}.{match[1]}" if path else match[1], "is required"
    elif (match := _ENUM.match(message)) and (choices := _choices(cls, path)):
        message = f"{match[1]} is not one of {', '.join(choices)}"
    problem = FieldProblem(path, message)
    return InvalidError(f"{cls.KIND} is invalid: {problem}", problems=[problem])


_MISSING = re.compile(r"Object missing required field `(.+)`$")
_ENUM = re.compile(r"Invalid enum value (.+)$")
_ANY_KEY = "[...]"


def _with_keys(cls: Any, plain: Any, path: str) -> str:
    """Return the path with the keys of mappings, which msgspec leaves out."""
    before, found, after = path.partition(_ANY_KEY)
    kind, value = cls, plain
    for step in before.split("."):
        name, *indexes = step.replace("]", "").split("[")
        kind, value = _option(_fields(kind)[name]), value[name]
        for index in indexes:
            kind, value = _option(get_args(kind)[0]), value[int(index)]
    inner = _option(get_args(kind)[1])
    for key, item in value.items():
        try:
            msgspec.convert(item, get_args(kind)[1])
        except msgspec.ValidationError:
            if _ANY_KEY not in after:
                return f"{before}.{key}{after}"
            return f"{before}.{key}.{_with_keys(inner, item, after.removeprefix('.'))}"
    return before + found + after


def _choices(cls: Any, path: str) -> tuple[str, ...]:
    """Return the values of an enum field; empty for other fields."""
    kind = cls
    for step in path.split("."):
        name, *indexes = step.split("[")
        if isinstance(kind, type) and issubclass(kind, Struct):
            kind = _option(_fields(kind).get(name))
        else:
            kind = _option(get_args(kind)[-1]) if get_args(kind) else None
        for _ in indexes:
            kind = _option(get_args(kind)[0]) if get_args(kind) else None
    options = (kind, *get_args(kind))
    enums = (item for item in options if isinstance(item, type) and issubclass(item, StrEnum))
    return tuple(member.value for enum in enums for member in enum)


def _option(kind: Any) -> Any:
    """Return the type of an optional field without `None`."""
    if get_origin(kind) in (Union, UnionType):
        return next((option for option in get_args(kind) if _holds_structs(option)), kind)
    return kind


def without_nulls(cls: Any, plain: Any) -> Any:
    """Remove nulls from fields that the type defines: there, null means absent.

    Free-form parts (pod templates, patches) are left unchanged.
    """
    if isinstance(cls, type) and issubclass(cls, Struct) and isinstance(plain, dict):
        known = _fields(cls)
        return {
            name: without_nulls(known.get(name, Any), item)
            for name, item in cast("dict[str, Any]", plain).items()
            if item is not None or name not in known
        }
    origin, arguments = get_origin(cls), get_args(cls)
    if origin in (Union, UnionType):
        inner = next((option for option in arguments if _holds_structs(option)), Any)
        return without_nulls(inner, plain)
    if origin is tuple and isinstance(plain, list) and arguments:
        return [without_nulls(arguments[0], item) for item in cast("list[Any]", plain)]
    if len(arguments) == 2 and arguments[1] is not Any and isinstance(plain, dict):
        return {
            name: without_nulls(arguments[1], item)
            for name, item in cast("dict[str, Any]", plain).items()
            if item is not None
        }
    return cast("Any", plain)


def _holds_structs(kind: Any) -> bool:
    return bool(get_args(kind)) or (isinstance(kind, type) and issubclass(kind, Struct))


_KNOWN_META = {"managedFields", "selfLink"}
"""Metadata fields of Kubernetes that clients send back and Paddock does not store."""


def unknown_fields(cls: Any, plain: object, path: str = "") -> list[FieldProblem]:
    """Return the fields that the type does not have, at any depth."""
    problems: list[FieldProblem] = []
    _walk(cls, plain, path, problems)
    return problems[:_MAX_PROBLEMS]


@cache
def _fields(cls: type[Struct]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.encode_name: hints[field.name] for field in structs.fields(cls)}


def _walk(kind: Any, value: Any, path: str, problems: list[FieldProblem]) -> None:
    if value is None:
        return
    if isinstance(kind, type) and issubclass(kind, Struct):
        if isinstance(value, dict):
            _walk_struct(kind, value, path, problems)  # pyright: ignore[reportUnknownArgumentType]
        return
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for option in arguments:
            _walk(option, value, path, problems)
    elif origin is tuple and isinstance(value, list) and arguments:
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            _walk(arguments[0], item, f"{path}[{index}]", problems)
    elif len(arguments) == 2 and isinstance(value, dict):
        for name, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            _walk(arguments[1], item, f"{path}.{name}", problems)


def _walk_struct(
    cls: type[Struct], value: dict[str, Any], path: str, problems: list[FieldProblem]
) -> None:
    known = _fields(cls)
    for name, item in value.items():
        where = f"{path}.{name}" if path else name
        if name in known:
            _walk(known[name], item, where, problems)
        elif not (path == "metadata" and name in _KNOWN_META):
            problems.append(FieldProblem(where, "unknown field"))
