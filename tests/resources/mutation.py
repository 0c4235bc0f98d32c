"""Helpers that try to change every part of an object, and that build complete documents."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from msgspec import Struct, structs

from paddock.resources.meta import Resource

FREE_FORM = {"deep": [{"list": [1, {"key": "value"}]}], "empty": {}, "none": None}

_DICT_CHANGES: tuple[Callable[[Any], Any], ...] = (
    lambda item: item.__setitem__("new", "value"),
    lambda item: item.__delitem__(next(iter(item), "new")),
    lambda item: item.__ior__({"new": "value"}),
    lambda item: item.update(new="value"),
    lambda item: item.setdefault("new", "value"),
    lambda item: item.pop("new", None),
    lambda item: item.popitem(),
    lambda item: item.clear(),
)
_LIST_CHANGES: tuple[Callable[[Any], Any], ...] = (
    lambda item: item.__setitem__(slice(0, 0), ["new"]),
    lambda item: item.__delitem__(slice(0, 1)),
    lambda item: item.__iadd__(["new"]),
    lambda item: item.__imul__(2),
    lambda item: item.append("new"),
    lambda item: item.extend(["new"]),
    lambda item: item.insert(0, "new"),
    lambda item: item.pop(),
    lambda item: item.remove("new"),
    lambda item: item.clear(),
    lambda item: item.sort(),
    lambda item: item.reverse(),
)


def accepted_changes(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every mutable part of an object."""
    changes: tuple[Callable[[Any], Any], ...] = ()
    if isinstance(value, Struct):
        changes = tuple(
            lambda obj, name=name: setattr(obj, name, getattr(obj, name))
            for name in value.__struct_fields__
        )
    elif isinstance(value, Mapping):
        changes = _DICT_CHANGES
    elif isinstance(value, list):
        changes = _LIST_CHANGES
    if isinstance(value, (set, bytearray)) or any(_accepts(change, value) for change in changes):
        yield path
    for step, item in _inside(value):
        yield from accepted_changes(item, path + step)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield f".{name}", getattr(value, name)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield f"[{name}]", item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"[{index}]", item


def _accepts(change: Callable[[Any], Any], value: Any) -> bool:
    try:
        change(value)
    except (TypeError, AttributeError):
        return False
    return True


def mappings(value: Any) -> int:
    """Return the number of non-empty mappings inside an object."""
    if isinstance(value, Struct):
        return sum(mappings(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, Mapping):
        return bool(value) + sum(map(mappings, value.values()))
    return sum(map(mappings, value)) if isinstance(value, (list, tuple)) else 0


def document(kind: type[Resource]) -> dict[str, Any]:
    """Return a document with a value in every field of a kind. It need not be valid."""
    plain = _sample(kind)
    return {**plain, "kind": kind.KIND, "apiVersion": kind.API_VERSION}


def _sample(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return FREE_FORM
    if origin in (Union, UnionType):
        return _sample(next(option for option in arguments if option is not type(None)))
    if origin is tuple:
        return [_sample(arguments[0])]
    if len(arguments) == 2:
        return {"key": _sample(arguments[1])}
    if issubclass(hint, Struct):
        hints = get_type_hints(hint)
        return {item.encode_name: _sample(hints[item.name]) for item in structs.fields(hint)}
    if issubclass(hint, Enum):
        return next(iter(hint)).value
    return {str: "x", int: 1, float: 1.0, bool: True, datetime: "2030-01-01T00:00:00Z"}[hint]


def thawed(value: Any) -> Any:
    """Rebuild an object through its constructors, from plain dicts and lists."""
    if isinstance(value, Struct):
        return type(value)(
            **{name: thawed(getattr(value, name)) for name in value.__struct_fields__}
        )
    if isinstance(value, Mapping):
        return {name: thawed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [thawed(item) for item in value]
    return tuple(map(thawed, value)) if type(value) is tuple else value
