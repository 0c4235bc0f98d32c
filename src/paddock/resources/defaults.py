"""Rendering of objects for readers, with defaults filled in.

The encoding for storage leaves defaults out to stay small (`codec.encode`). Readers want to see the
effective values, and `kubectl apply` compares the object it sent with the object it reads. Inside
lists defaults stay out, because clients compare whole lists with what they sent.
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
"""Fields in which 0 means that no controller has observed the object. They are left out, because
`kubectl wait` would wait for a greater value."""


def explicit(obj: Resource) -> dict[str, Any]:
    """Return an object as plain dicts and lists: with defaults, without null and empty values."""
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
    """Return the rendered value, or `None` if it is left out."""
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
    """Return the rendered value of a mapping. Its key is kept even if the value is empty."""
    if isinstance(item, Struct):
        return _render_struct(item) or {}
    return to_builtins(item)


def _micro_times(spec: LeaseSpec) -> dict[str, str]:
    """Return the timestamps of a lease with microseconds, as Kubernetes clients require."""
    moments = {"acquireTime": spec.acquire_time, "renewTime": spec.renew_time}
    return {
        name: moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        for name, moment in moments.items()
        if moment is not None
    }
