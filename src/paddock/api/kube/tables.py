"""Tables for `kubectl get`: printer columns and ages. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, cast

from msgspec import Struct, structs

from paddock.api.kube.rendering import list_metadata, partial, render
from paddock.kit.clock import rfc3339
from paddock.resources.kinds.builtin import Event
from paddock.resources.meta import Resource
from paddock.resources.registry import Column, KindInfo

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86_400, 365 * 86_400
_TYPES = {"string", "integer", "number", "boolean", "date"}


def table(
    info: KindInfo,
    objects: Iterable[Resource],
    *,
    now: datetime,
    include: str = "Metadata",
    version: str = "",
    continue_token: str = "",
    remaining: int | None = None,
    with_columns: bool = True,
) -> dict[str, Any]:
    """Return objects as rows; `include` selects the object data that each row carries."""
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": list_metadata(version, continue_token, remaining),
        "columnDefinitions": definitions(info) if with_columns else [],
        "rows": [_row(info, obj, now, include) for obj in objects],
    }


def definitions(info: KindInfo) -> list[dict[str, Any]]:
    """Return the column definitions of a kind; the name comes first."""
    name: dict[str, Any] = {
        "name": "Name",
        "type": "string",
        "format": "name",
        "description": "Name of the object, unique within its namespace.",
        "priority": 0,
    }
    if info.cls is Event:
        name["priority"] = 1
    return [name, *(_definition(column) for column in info.columns)]


def age(moment: datetime | None, now: datetime) -> str:
    """Return how long ago a time was, as short as kubectl prints it."""
    if moment is None:
        return "<unknown>"
    seconds = int((now - moment).total_seconds())
    if seconds < 0:
        return "0s" if seconds > -2 else "<invalid>"
    for limit, large, small in _STEPS:
        if seconds < limit:
            return _duration(seconds, large, small)
    return f"{seconds // _YEAR}y"


_UNITS = {1: "s", _MINUTE: "m", _HOUR: "h", _DAY: "d", _YEAR: "y"}
_STEPS = (
    (2 * _MINUTE, 1, 0),
    (10 * _MINUTE, _MINUTE, 1),
    (3 * _HOUR, _MINUTE, 0),
    (8 * _HOUR, _HOUR, _MINUTE),
    (48 * _HOUR, _HOUR, 0),
    (8 * _DAY, _DAY, _HOUR),
    (2 * _YEAR, _DAY, 0),
    (8 * _YEAR, _YEAR, _DAY),
)
"""Up to this many seconds: the first unit, and the unit of the remainder."""


def _duration(seconds: int, large: int, small: int) -> str:
    text = f"{seconds // large}{_UNITS[large]}"
    rest = seconds % large // small if small else 0
    return f"{text}{rest}{_UNITS[small]}" if rest else text


def _definition(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "type": column.type if column.type in _TYPES else "string",
        "format": "",
        "description": f"The value of {column.path}.",
        "priority": column.priority,
    }


def _row(info: KindInfo, obj: Resource, now: datetime, include: str) -> dict[str, Any]:
    cells = [obj.metadata.name, *(_cell(obj, column, now) for column in info.columns)]
    row: dict[str, Any] = {"cells": cells}
    if include == "Object":
        row["object"] = render(obj)
    elif include == "Metadata":
        row["object"] = partial(obj)
    return row


def _cell(obj: Resource, column: Column, now: datetime) -> Any:
    special = _SPECIAL.get((obj.KIND, column.name))
    if special is not None:
        return special(obj)
    value: Any = obj
    for part in _parts(column.path):
        if isinstance(value, Struct):
            value = getattr(value, _attributes(type(value)).get(part, ""), None)
        else:
            value = cast("Mapping[str, Any]", value).get(part) if value else None
    if column.type == "date":
        return age(value if isinstance(value, datetime) else None, now)
    if value is None or value == "":
        return None
    if column.type == "string":
        return rfc3339(value) if isinstance(value, datetime) else str(value)
    return value


@cache
def _attributes(cls: type[Struct]) -> dict[str, str]:
    return {field.encode_name: field.name for field in structs.fields(cls)}


@cache
def _parts(path: str) -> list[str]:
    return [part.replace("\\.", ".") for part in re.split(r"(?<!\\)\.", path.removeprefix("."))]


def _event_object(obj: Resource) -> str:
    subject = obj.involved_object if isinstance(obj, Event) else None
    return f"{subject.kind.lower()}/{subject.name}" if subject else ""


def _phase(obj: Resource) -> str:
    return "Terminating" if obj.is_deleting else "Active"


_SPECIAL: dict[tuple[str, str], Callable[[Resource], Any]] = {
    ("Event", "Object"): _event_object,
    ("Namespace", "Status"): _phase,
}
"""Cells that are computed, not read from a path."""
