"""Interning: share equal values between decoded objects; 100,000 sandboxes repeat most values.

Modifies objects in place, so use it only on objects that are not shared yet. Each field is sampled
and skipped if its values rarely repeat (uids, names, hashes).
"""

from collections.abc import Hashable, Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct, structs

_TRIAL = 512
_MAX_DISTINCT = 8192


class Interner:
    """Holds the values seen so far, by field."""

    def __init__(self) -> None:
        self._plans: dict[type[Struct], list[_Field]] = {}

    def share(self, obj: Struct) -> None:
        """Replace values inside the object by equal ones seen before."""
        cls = type(obj)
        plan = self._plans.get(cls)
        if plan is None:
            plan = self._plans[cls] = [_Field(name) for name in cls.__struct_fields__]
        for field in plan:
            value = getattr(obj, field.name)
            if not value:
                continue
            shared = value if field.values is None else field.known(value)
            if shared is not value:
                structs.force_setattr(obj, field.name, shared)
            elif field.is_deep is not False:
                self._share_inside(value, field)
            if field.values is None and field.is_deep is False:
                # No gain: skip the field in later objects.
                self._plans[cls] = [other for other in self._plans[cls] if other is not field]

    def _share_inside(self, value: Any, field: "_Field") -> None:
        if isinstance(value, Struct):
            field.is_deep = True
            self.share(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
            field.is_deep = True
            for item in value:  # pyright: ignore[reportUnknownVariableType]
                self.share(item)  # pyright: ignore[reportUnknownArgumentType]
        elif field.is_deep is None:
            field.is_deep = False
            if not isinstance(value, (str, datetime, tuple, Mapping)):
                field.values = None  # numbers and booleans are small


class _Field:
    """One field of one type, and its known values."""

    __slots__ = ("is_deep", "name", "seen", "values")

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[Hashable, Any] | None = {}
        """`None` once sampling has shown no gain."""
        self.seen = 0
        self.is_deep: bool | None = None
        """Whether there are structs inside; `None` until one value was seen."""

    def known(self, value: Any) -> Any:
        """Return the equal value seen before, or this one."""
        values = self.values
        if values is None:
            return value
        try:
            known = values.setdefault(_key(value), value)
        except TypeError:  # something inside cannot be hashed
            self.values = None
            return value
        self.seen += 1
        distinct = len(values)
        if (self.seen == _TRIAL and distinct > _TRIAL // 2) or distinct > _MAX_DISTINCT:
            self.values = None
        return known


def _key(value: Any) -> Hashable:
    if not isinstance(value, dict):
        return value
    items: tuple[tuple[str, Any], ...] = tuple(value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if any(type(item) is not str for _, item in items):
        raise TypeError("not interned: 1 and True are equal but not the same")
    return items
