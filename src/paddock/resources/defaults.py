"""Objects as people see them: with the defaults that are in force written out.

Storage leaves defaults out to stay small (`codec.encode`). Someone who reads an object wants to
know what holds, and `kubectl apply` compares what it was given with what it sees. Inside lists
defaults stay unwritten, because clients compare lists as a whole with what they once sent.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import Any

from msgspec import Struct, structs

from paddock.resources.codec import to_builtins
from paddock.resources.kinds.builtin import LeaseSpec
from paddock.resources.meta import Resource

_NOTHING_AT_ZERO = {"observed_generation", "pause_observed_generation"}
"""Fields where 0 means that nobody has looked yet; `kubectl wait` would wait for more than 0."""


def explicit(obj: Resource) -> dict[str, Any]:
    """Return an object as plain dicts and lists, defaults included; nothing is null or empty."""
    plain: dict[str, Any] = {
        "apiVersion": obj.API_VERSION,
        "kind": obj.KIND,
        "metadata": to_builtins(obj.metadata),
    }
    for name, encoded in _fields(type(obj)).items():
        if name in ("api_version", "kind", "metadata"):
            continue
        value = getattr(obj, name)
        rendered = _render(value)
        if rendered is not None or isinstance(value, Struct):
            plain[encoded] = {} if rendered is None else rendered
    return plain


@cache
def _fields(cls: type[Struct]) -> dict[str, str]:
    return {field.name: field.encode_name for field in structs.fields(cls)}


def _render(value: Any) -> Any:
    """Return what is shown for a value; `None` for what is not shown at all."""
    if value is None or value == "":
        return None
    if isinstance(value, Struct):
        return _render_struct(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return to_builtins(value)
    if isinstance(value, (tuple, list)):
        return to_builtins(value) if value else None
    if isinstance(value, Mapping):
        items = {key: _entry(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        return items or None  # pyright: ignore[reportUnknownVariableType]
    return value


def _render_struct(value: Struct) -> dict[str, Any] | None:
    plain: dict[str, Any] = {}
    for name, encoded in _fields(type(value)).items():
        rendered = _render(getattr(value, name))
        if rendered is not None and not (rendered == 0 and name in _NOTHING_AT_ZERO):
            plain[encoded] = rendered
    if isinstance(value, LeaseSpec):
        plain |= _micro_times(value)
    return plain or None


def _entry(item: Any) -> Any:
    """Return the value of a mapping: its key stays, even where the value says nothing."""
    if isinstance(item, Struct):
        return _render_struct(item) or {}
    return to_builtins(item)


def _micro_times(spec: LeaseSpec) -> dict[str, str]:
    """Write a lease's moments with six digits after the point, as clients insist."""
    moments = {"acquireTime": spec.acquire_time, "renewTime": spec.renew_time}
    return {
        name: moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        for name, moment in moments.items()
        if moment is not None
    }
