"""Server-side apply: a field manager sets fields and owns them. Pure.

Ownership is stored in one annotation of the object, for managers that apply; other writes own
nothing. Two appliers that disagree on a field get a conflict, as in Kubernetes, but an apply
overwrites other edits without a conflict. Lists are owned as a whole. A field that its manager no
longer sets, and that no other manager owns, is removed; so is a whole item of a map in the spec
when none of its fields is set any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct

from paddock.api.kube.body.patches import merge_patch
from paddock.kit.errors import ConflictError, FieldProblem
from paddock.resources.meta import Resource, with_meta

ANNOTATION = "paddock.dev/field-managers"
"""The annotation with the ownership; clients see it as `metadata.managedFields` instead."""

Path = tuple[str, ...]
Owners = Mapping[str, frozenset[Path]]

_IDENTITY = {("apiVersion",), ("kind",), ("status",)}
_IDENTITY_OF_METADATA = {
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp",
    "deletionTimestamp", "deletionGracePeriodSeconds", "generateName", "managedFields", "selfLink",
}  # fmt: skip
_MISSING = object()


class ApplyConflictError(ConflictError):
    """Another manager owns a field with a different value."""

    def __init__(self, message: str, *, problems: Sequence[FieldProblem], hint: str) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class Applied(Struct, frozen=True):
    """The result of an apply."""

    document: dict[str, Any]
    owners: Owners


def apply(
    live: Mapping[str, Any], wanted: Mapping[str, Any], *, manager: str, owners: Owners, force: bool
) -> Applied:
    """Merge a manager's fields into the live object and make it their owner."""
    fields = frozenset(_leaves(wanted))
    others = {name: paths for name, paths in owners.items() if name != manager}
    conflicts = list(_conflicts(live, wanted, fields, others))
    if conflicts and not force:
        raise _conflict(conflicts)
    lost = {path for _, path in conflicts}
    kept = {
        name: frozenset(path for path in paths if not any(_overlap(path, one) for one in lost))
        for name, paths in others.items()
    }
    document = cast("dict[str, Any]", merge_patch({}, dict(live)))
    for path in owners.get(manager, frozenset()) - fields:
        is_needed = any(_overlap(path, one) for one in fields) or any(
            _overlap(path, one) for paths in kept.values() for one in paths
        )
        if not is_needed:
            _delete(document, _whole(path, wanted, kept))
    result = merge_patch(document, _strip_unowned(wanted))
    mine = {manager: fields} if fields else {}
    return Applied(result, {name: paths for name, paths in (kept | mine).items() if paths})


def _whole(path: Path, wanted: Mapping[str, Any], others: Owners) -> Path:
    """Return the largest part of a spec to remove with a field that is no longer set.

    A map item or group without any field set is removed as a whole, with its defaults and with
    fields that controllers wrote; the top-level fields of the spec are never removed together.
    """
    if path[0] != "spec":
        return path
    owned = [one for paths in others.values() for one in paths]
    for size in range(3, len(path)):
        part = path[:size]
        if at(wanted, part) is _MISSING and not any(one[:size] == part for one in owned):
            return part
    return path


def _leaves(document: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every field that a document sets; an empty object sets none."""
    if _is_identity(path) or document is None:
        return
    if isinstance(document, dict):
        for name, value in cast("dict[str, Any]", document).items():
            yield from _leaves(value, (*path, name))
    elif path:
        yield path


def _is_identity(path: Path) -> bool:
    if path in _IDENTITY:
        return True
    return len(path) == 2 and path[0] == "metadata" and path[1] in _IDENTITY_OF_METADATA


def _conflicts(
    live: Mapping[str, Any], wanted: Mapping[str, Any], fields: frozenset[Path], others: Owners
) -> Iterator[tuple[str, Path]]:
    for name, owned in sorted(others.items()):
        for path in sorted(fields):
            if any(_overlap(path, one) for one in owned) and at(live, path) != at(wanted, path):
                yield name, path


def _overlap(one: Path, other: Path) -> bool:
    size = min(len(one), len(other))
    return one[:size] == other[:size]


def at(document: Any, path: Path) -> Any:
    """Return a field, or a sentinel that equals nothing else if it is missing."""
    for part in path:
        if not isinstance(document, dict) or part not in document:
            return _MISSING
        document = cast("Any", document[part])
    return document


def _delete(document: dict[str, Any], path: Path) -> None:
    """Remove a field, and enclosing objects that become empty."""
    parents: list[dict[str, Any]] = [document]
    for part in path[:-1]:
        child = parents[-1].get(part)
        if not isinstance(child, dict):
            return
        parents.append(cast("dict[str, Any]", child))
    parents[-1].pop(path[-1], None)
    for part, parent, child in reversed(list(zip(path, parents, parents[1:], strict=False))):
        if not child and len(path) > 1 and parent is not document:
            parent.pop(part, None)


def _strip_unowned(document: Any, path: Path = ()) -> Any:
    """Return a document without the fields that no manager can own, and without nulls."""
    if not isinstance(document, dict):
        return document
    return {
        name: _strip_unowned(value, (*path, name))
        for name, value in cast("dict[str, Any]", document).items()
        if value is not None and not _is_identity((*path, name))
    }


def _conflict(conflicts: list[tuple[str, Path]]) -> ApplyConflictError:
    problems = [FieldProblem(".".join(path), f'conflict with "{name}"') for name, path in conflicts]
    text = "; ".join(str(problem) for problem in problems)
    return ApplyConflictError(
        f"apply failed with {len(problems)} conflict{'s'[: len(problems) - 1]}: {text}",
        problems=problems,
        hint="use --force-conflicts to take the fields over, or leave them out",
    )


# ---- storage and rendering of ownership ----------------------------------------------------------


def read_owners(annotations: Mapping[str, str]) -> Owners:
    """Parse ownership from an object's annotations; invalid data means no owners."""
    try:
        kept = msgspec.json.decode(
            annotations.get(ANNOTATION, "{}"), type=dict[str, list[tuple[str, ...]]]
        )
    except msgspec.DecodeError:
        return {}
    return {name: frozenset(paths) for name, paths in kept.items()}


def write_owners(owners: Owners) -> str:
    """Return ownership as text for the annotation; equal ownership gives equal text."""
    kept = {name: sorted(paths) for name, paths in sorted(owners.items())}
    return msgspec.json.encode(kept).decode()


def keep_owners(obj: Resource, live: Resource) -> Resource:
    """Return the object with the live object's ownership, which clients neither see nor send."""
    kept = live.metadata.annotations.get(ANNOTATION)
    annotations = {
        key: value for key, value in obj.metadata.annotations.items() if key != ANNOTATION
    }
    if kept is not None:
        annotations[ANNOTATION] = kept
    return with_meta(obj, annotations=annotations)


def with_owners(obj: Resource, owners: Owners) -> Resource:
    """Return the object with this ownership in its annotation."""
    text = write_owners(owners)
    annotations = {**obj.metadata.annotations, ANNOTATION: text}
    return with_meta(obj, annotations=annotations)


def managed_fields(owners: Owners, api_version: str) -> list[dict[str, Any]]:
    """Return ownership as Kubernetes' `managedFields`."""
    return [
        {
            "manager": name,
            "operation": "Apply",
            "apiVersion": api_version,
            "fieldsType": "FieldsV1",
            "fieldsV1": _field_tree(paths),
        }
        for name, paths in sorted(owners.items())
    ]


def _field_tree(paths: frozenset[Path]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        node = tree
        for part in path:
            node = node.setdefault(f"f:{part}", {})
    return tree
