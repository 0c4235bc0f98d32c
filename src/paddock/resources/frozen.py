"""Immutable mappings and lists for the free-form parts of a resource.

Readers share resources with the cache and the store. A frozen struct protects its fields, but not a
dict inside a field. So every struct with a mapping replaces it by a `FrozenDict` in
`__post_init__`, which msgspec calls at construction, decoding, conversion and `structs.replace`.
Both classes are subclasses of the builtins: msgspec encodes them natively, and they compare equal
to plain ones.
"""

from collections.abc import Mapping
from typing import Any, NoReturn, Self, cast

from msgspec import Struct, structs


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        f"{type(self).__name__} is immutable: other readers share it; build a new one instead"
    )


class FrozenDict(dict[str, Any]):
    """An immutable dict. `{**d}`, `d | other` and `d.copy()` return plain dicts."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse
    update = clear = pop = popitem = setdefault = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (dict(self),))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class FrozenList(list[Any]):
    """An immutable list, for lists inside free-form documents."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (list(self),))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


EMPTY: Mapping[str, Any] = FrozenDict()
"""Default of every mapping field. Always this object: msgspec omits defaults by identity."""


def freeze(value: Any) -> Any:
    """Return the value with all mappings and lists inside made immutable."""
    if isinstance(value, (FrozenDict, FrozenList)):
        return value
    if isinstance(value, Mapping):
        document = cast("Mapping[str, Any]", value)
        if not document:
            return EMPTY
        return FrozenDict({name: freeze(item) for name, item in document.items()})
    if isinstance(value, list):
        return FrozenList(map(freeze, cast("list[Any]", value)))
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        # Return the same tuple if nothing changes, so that it stays shared.
        return items if all(map(is_frozen, items)) else tuple(map(freeze, items))
    return value


def is_frozen(value: Any) -> bool:
    """Whether the value contains no mutable mapping or list. Frozen ones are not inspected."""
    if isinstance(value, tuple):
        return all(map(is_frozen, cast("tuple[Any, ...]", value)))
    if isinstance(value, (FrozenDict, FrozenList)):
        return True
    return not isinstance(value, (Mapping, list))


def freeze_flat(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a mapping of immutable values (strings, structs) as a `FrozenDict`."""
    if type(value) is FrozenDict:
        return value
    return FrozenDict(value) if value else EMPTY


def freeze_fields(obj: Struct, *names: str) -> None:
    """Freeze fields that hold mappings of immutable values, for `__post_init__`."""
    for name in names:
        value = getattr(obj, name)
        if type(value) is not FrozenDict:
            structs.force_setattr(obj, name, freeze_flat(value))


def freeze_documents(obj: Struct, *names: str) -> None:
    """Freeze fields that hold free-form documents, at any depth, for `__post_init__`."""
    for name in names:
        value = getattr(obj, name)
        if (frozen := freeze(value)) is not value:
            structs.force_setattr(obj, name, frozen)
