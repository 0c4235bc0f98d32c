"""Strategic merge of plain documents, with one table of merge keys. Pure.

Objects are merged, `null` removes a field, lists are replaced. Lists in `MERGE_KEYS` are merged
item by item, lists in `MERGED_SETS` are extended. Directives (`$patch`, `$retainKeys`, …) work as
in Kubernetes. Used for PATCH requests, for shard patches of batches, and for the `podTemplate` of
templates.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.codec import unknown_fields

MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "ports": ("containerPort", "port"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Keys that identify the items of a list: the first one that every item of the patch has.

Ports of containers are identified by `containerPort`, ports of templates by `port`.
"""
MERGED_SETS = frozenset({"finalizers"})
"""Lists of scalars that a patch extends."""
_DIRECTIVES = ("$patch", "$retainKeys", "$setElementOrder", "$deleteFromPrimitiveList")
S = TypeVar("S", bound=Struct)


def merged(base: S, patch: Mapping[str, Any], *, where: str) -> S:
    """Return the struct with a patch merged in. `InvalidError` names `where` and the cause."""
    try:
        document = merge(msgspec.to_builtins(base), patch)
        result = msgspec.convert(document, type(base))
    except (msgspec.ValidationError, InvalidError, TypeError, ValueError) as error:
        raise InvalidError(f"{where} cannot be merged: {error}") from error
    if unknown := unknown_fields(type(base), document):
        names = ", ".join(problem.path for problem in unknown)
        raise InvalidError(f"{where} cannot be merged: unknown field {names}")
    return result


def merge(base: Any, patch: Mapping[str, Any], *, has_directives: bool = True) -> dict[str, Any]:
    """Return the document with a patch merged in. Neither is changed or shared.

    Without directives, names that begin with `$` are ordinary fields. `InvalidError` has the path
    of the invalid field.
    """
    return _Merge(has_directives=has_directives).object(_copied(base), patch, "")


class _Merge:
    """One merge operation."""

    def __init__(self, *, has_directives: bool) -> None:
        self._has_directives = has_directives

    def object(self, base: Any, patch: Mapping[str, Any], path: str) -> dict[str, Any]:
        # The base was copied as a whole, so that the result shares nothing with it.
        result: dict[str, Any] = (
            dict(cast("Mapping[str, Any]", base)) if isinstance(base, Mapping) else {}
        )
        changes = dict(patch)
        if self._has_directives:
            directives = {name: changes.pop(name) for name in patch if name.startswith("$")}
            how = directives.get("$patch", "merge")
            if how == "delete":
                return {}
            if how == "replace":
                return _copied(changes)
            if how != "merge":
                raise _refused(
                    path, f"{how!r} is not a $patch directive: use replace, delete or merge"
                )
            result = _directed(result, directives, path)
        for name, value in changes.items():
            if value is None:
                result.pop(name, None)
            else:
                where = f"{path}.{name}" if path else name
                result[name] = self._value(name, result.get(name), value, where)
        return result

    def _value(self, name: str, base: Any, patch: Any, path: str) -> Any:
        if isinstance(patch, Mapping):
            return self.object(base, cast("Mapping[str, Any]", patch), path)
        if not isinstance(patch, (list, tuple)):
            return patch
        items = list(cast("list[Any]", patch))
        present = list(cast("list[Any]", base)) if isinstance(base, list) else []
        if name in MERGED_SETS:
            return [*present, *(_copied(item) for item in items if item not in present)]
        keys = MERGE_KEYS.get(name)
        if keys is None or not all(isinstance(item, Mapping) for item in (*present, *items)):
            return _copied(items)
        return self._list(present, items, keys, path)

    def _list(
        self, present: list[Any], patch: list[Any], keys: tuple[str, ...], path: str
    ) -> list[Any]:
        if self._has_directives and any(item.get("$patch") == "replace" for item in patch):
            return [_copied(item) for item in patch if "$patch" not in item]
        fitting = (key for key in keys if all(key in item for item in patch))
        # The key to ask for if none fits: ports of containers have another than ports of templates.
        asked = keys[0] if "ontainers[" in path else keys[-1]
        key = next(fitting, asked)
        result: dict[int, Any] = dict(enumerate(present))
        places: dict[Any, int] = {}
        for place, item in enumerate(present):
            if key in item:
                places.setdefault(_identity(item, key, f"{path}[{place}]"), place)
        for place, item in enumerate(patch):
            where = f"{path}[{place}]"
            identity = _identity(item, key, where)
            known = places.get(identity, len(present) + place)
            if len(keys) == 1:
                places.setdefault(identity, known)
            # Two new ports may have the same number, one for TCP and one for UDP.
            if self._has_directives and item.get("$patch") == "delete":
                result.pop(known, None)
            else:
                result[known] = self.object(result.get(known), item, where)
        return list(result.values())


def _directed(result: dict[str, Any], directives: dict[str, Any], path: str) -> dict[str, Any]:
    if isinstance(kept := directives.get("$retainKeys"), (list, tuple)):
        result = {name: value for name, value in result.items() if name in kept}
    for name, value in directives.items():
        directive, _, field = name.partition("/")
        if directive not in _DIRECTIVES:
            raise _refused(path, f"{name!r} is not a directive")
        if directive == "$deleteFromPrimitiveList" and isinstance(value, (list, tuple)):
            present = result.get(field)
            items = cast("list[Any]", present) if isinstance(present, list) else []
            result[field] = [item for item in items if item not in value]
    return result


def _identity(item: Mapping[str, Any], key: str, path: str) -> tuple[bool, Any]:
    """Return the merge key of an item. As in JSON, `true` differs from 1."""
    if key not in item:
        raise _refused(f"{path}.{key}", "is required in every item: it is the merge key")
    value = item[key]
    if isinstance(value, (Mapping, list, tuple)):
        raise _refused(f"{path}.{key}", "must be a scalar: it is the merge key")
    return isinstance(value, bool), value


def _copied(value: Any) -> Any:
    """Return a deep copy made of plain, mutable dicts and lists."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {name: _copied(item) for name, item in items}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in cast("list[Any]", value)]
    return value


def _refused(path: str, message: str) -> InvalidError:
    problem = FieldProblem(path, message)
    return InvalidError(f"the patch cannot be applied: {problem}", problems=[problem])
