"""Merging a shard's patch into its template: strategic merge of plain documents, and back. Pure.

Objects merge, `null` removes, lists are replaced; lists of variables, ports and volumes are merged
by the field that names their items. `{"$patch": "replace"}` and `{"$patch": "delete"}` do as in
Kubernetes.
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError
from paddock.resources.codec import unknown_fields

MERGE_KEYS: Mapping[str, str] = {"env": "name", "ports": "port", "volumes": "name"}
_DIRECTIVE = "$patch"
S = TypeVar("S", bound=Struct)


def merged(base: S, patch: Mapping[str, Any], *, where: str) -> S:
    """Give the struct with a patch merged in; `InvalidError` says what is wrong with it."""
    plain = msgspec.to_builtins(base)
    try:
        document = _object(plain, patch)
        result = msgspec.convert(document, type(base))
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidError(f"{where} cannot be merged: {error}") from error
    if unknown := unknown_fields(type(base), document):
        names = ", ".join(problem.path for problem in unknown)
        raise InvalidError(f"{where} cannot be merged: unknown field {names}")
    return result


def _object(base: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    directive = patch.get(_DIRECTIVE)
    own = {name: value for name, value in patch.items() if name != _DIRECTIVE}
    if directive in ("replace", "delete"):
        return copy.deepcopy(own) if directive == "replace" else {}
    if directive is not None:
        raise ValueError(f"{directive!r} is not a directive: use replace or delete")
    result: dict[str, Any] = dict(cast("Any", base)) if isinstance(base, Mapping) else {}
    for name, value in own.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _value(name, result.get(name), value)
    return result


def _value(name: str, base: Any, patch: Any) -> Any:
    if isinstance(patch, Mapping):
        return _object(base, cast("Mapping[str, Any]", patch))
    key = MERGE_KEYS.get(name)
    if isinstance(patch, (list, tuple)) and key is not None:
        items: list[Any] = list(cast("Any", patch))
        if all(isinstance(item, Mapping) and key in item for item in items):
            return _list(base, items, key)
    return copy.deepcopy(cast("Any", patch))


def _list(base: Any, patch: list[Mapping[str, Any]], key: str) -> list[Any]:
    present: dict[Any, Any] = {item[key]: item for item in base or ()}
    for item in patch:
        if item.get(_DIRECTIVE) == "delete":
            present.pop(item[key], None)
        else:
            present[item[key]] = _object(present.get(item[key]), item)
    return list(present.values())
