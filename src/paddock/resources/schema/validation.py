"""Validation of objects: all problems at once, each with the path of its field.

Pure. Limits are in `constraints`, rules between fields in `rules`. Metadata is checked here. An
update is never rejected because of a part of the spec that it does not change. So a tightened limit
cannot trap an object with a finalizer, and small changes are cheap to check.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

from msgspec import Struct, structs

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.kinds.builtin import Namespace
from paddock.resources.meta import ObjectMeta, Resource
from paddock.resources.schema import formats
from paddock.resources.schema.constraints import FieldLimit, limit_of
from paddock.resources.schema.rules import RULES, TRANSITIONS, Rule, Transition

MAX_ANNOTATION_BYTES = 256 * 1024
MAX_PROBLEMS = 20
_SKIPPED = frozenset({"metadata", "status", "api_version", "kind"})


def validate_create(obj: Resource) -> None:
    """Raise `InvalidError` with all problems if the object is invalid."""
    _refuse(obj, problems_of(obj))


def validate_update(old: Resource, new: Resource) -> None:
    """Raise `InvalidError` with all problems if the update is invalid."""
    problems = [] if _is_same_meta(old.metadata, new.metadata) else _meta_problems(new)
    if new.is_deleting and (added := set(new.metadata.finalizers) - set(old.metadata.finalizers)):
        names = ", ".join(sorted(added))
        problems.append(
            FieldProblem("metadata.finalizers", f"cannot be added during deletion: {names}")
        )
    if _content(old) != _content(new):
        _struct(new, None, problems, skip=_SKIPPED, old=old)
    _refuse(new, problems)


def problems_of(obj: Resource) -> list[FieldProblem]:
    """Return all problems of an object."""
    return [*_meta_problems(obj), *_content_problems(obj)]


def _refuse(obj: Resource, problems: list[FieldProblem]) -> None:
    if not problems:
        return
    shown = problems[:MAX_PROBLEMS]
    name = obj.metadata.name or obj.metadata.generate_name or "?"
    text = "; ".join(str(problem) for problem in shown)
    raise InvalidError(
        f"{obj.KIND} {formats.shorten(name)} is invalid: {text}",
        problems=shown,
        hint=f"run `kubectl explain {obj.PLURAL}` for a description of every field",
    )


def _content(obj: Resource) -> dict[str, Any]:
    return {name: getattr(obj, name) for name in _names(type(obj)) if name not in _SKIPPED}


def _content_problems(obj: Resource) -> list[FieldProblem]:
    problems: list[FieldProblem] = []
    _struct(obj, None, problems, skip=_SKIPPED)
    return problems


@cache
def _names(cls: type[Struct]) -> dict[str, str]:
    return {field.name: field.encode_name for field in structs.fields(cls)}


class _Trail(NamedTuple):
    """Path within an object, rendered only if there is a problem."""

    above: "_Trail | None"
    step: str

    def __str__(self) -> str:
        if self.above is None:
            return self.step
        dot = "" if self.step.startswith("[") else "."
        return f"{self.above}{dot}{self.step}"


class _Visit(NamedTuple):
    """A field that can be invalid itself or contain invalid fields."""

    name: str
    step: str
    limit: FieldLimit | None
    default: Any


@cache
def _visits(cls: type[Struct]) -> tuple[_Visit, ...]:
    """Return the fields to check: those with a limit or with nested values."""
    hints = get_type_hints(cls)
    found: list[_Visit] = []
    for field in structs.fields(cls):
        limit = limit_of(cls, field.name)
        if limit is not None or _has_inside(hints[field.name]):
            found.append(_Visit(field.name, field.encode_name, limit, field.default))
    return tuple(found)


def _has_inside(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, (Struct, datetime)):
        return True
    return any(_has_inside(argument) for argument in get_args(hint))


def _struct(
    value: Struct,
    trail: _Trail | None,
    problems: list[FieldProblem],
    *,
    skip: frozenset[str] = frozenset(),
    old: Any = None,
) -> None:
    cls = type(value)
    known = type(old) is cls
    for name, step, limit, default in _visits(cls):
        now = getattr(value, name)
        # Defaults are valid, and by far the most common values. A missing spec is the exception:
        # its default has empty required fields.
        if now is None or name in skip or (now is default and trail is not None):
            continue
        before = getattr(old, name) if known else None
        if known and (now is before or now == before):
            continue
        _value(now, limit, _Trail(trail, step), problems, old=before)
    broken: list[Rule | Transition] = [rule for rule in RULES.get(cls, ()) if not rule.holds(value)]
    if known:
        broken += [rule for rule in TRANSITIONS.get(cls, ()) if not rule.holds(old, value)]
    problems += [FieldProblem(str(_Trail(trail, rule.path)), rule.message) for rule in broken]


def _value(
    value: Any,
    limit: FieldLimit | None,
    trail: _Trail,
    problems: list[FieldProblem],
    *,
    old: Any = None,
) -> None:
    if limit is not None and (message := _violation(value, limit)):
        problems.append(FieldProblem(str(trail), message))
    if isinstance(value, (str, int, float)):
        return
    if isinstance(value, Struct):
        _struct(value, trail, problems, old=old)
    elif isinstance(value, tuple):
        items = limit.items if limit else None
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            _value(item, items, _Trail(trail, f"[{index}]"), problems)
    elif isinstance(value, Mapping):
        _mapping(value, limit, trail, problems)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, datetime) and value.tzinfo is None:
        message = "must have a time zone, such as 2030-01-01T00:00:00Z"
        problems.append(FieldProblem(str(trail), message))


def _mapping(
    value: Mapping[str, Any], limit: FieldLimit | None, trail: _Trail, problems: list[FieldProblem]
) -> None:
    for key, item in value.items():
        if limit and limit.key_check and (message := limit.key_check(key)):
            problems.append(FieldProblem(str(trail), message))
        if item is not None:
            _value(item, limit.items if limit else None, _Trail(trail, key), problems)


def _violation(value: Any, limit: FieldLimit) -> str | None:
    if isinstance(value, str):
        return _text_problem(value, limit) or (limit.check(value) if limit.check else None)
    if isinstance(value, (int, float)):
        return None if isinstance(value, bool) else _number_problem(value, limit)
    return _size_problem(value, limit)


def _number_problem(value: float, limit: FieldLimit) -> str | None:
    low, high = limit.minimum, limit.maximum
    if low is not None and (value < low or (limit.is_above and value == low)):
        return f"is {value}; must be {'greater than' if limit.is_above else 'at least'} {low:g}"
    if high is not None and value > high:
        return f"is {value}; must be at most {int(high)}"
    return None


def _text_problem(value: str, limit: FieldLimit) -> str | None:
    if limit.min_length and not value:
        return "must not be empty"
    if limit.max_length is not None and len(value) > limit.max_length:
        return f"must be no more than {limit.max_length} characters"
    if limit.choices and value not in limit.choices:
        return f"{formats.shorten(value)} is not one of {', '.join(limit.choices)}"
    if limit.pattern and not _compiled(limit.pattern).search(value):
        return f"{formats.shorten(value)} is not {limit.meaning}"
    return None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # `$` matches only at the end in RE2, but also before a final newline in Python.
    return re.compile(re.sub(r"\$$", r"\\Z", pattern))


def _size_problem(value: Any, limit: FieldLimit) -> str | None:
    if isinstance(value, tuple):
        size = len(value)  # pyright: ignore[reportUnknownArgumentType]
        if limit.min_items is not None and size < limit.min_items:
            return f"must have at least {limit.min_items} item{'s'[: limit.min_items - 1]}"
        if limit.max_items is not None and size > limit.max_items:
            return f"has {size} items; must have at most {limit.max_items}"
    if isinstance(value, Mapping):
        size = len(value)  # pyright: ignore[reportUnknownArgumentType]
        if limit.max_properties is not None and size > limit.max_properties:
            return f"has {size} entries; must have at most {limit.max_properties}"
    return None


def _is_same_meta(old: ObjectMeta, new: ObjectMeta) -> bool:
    """Whether the metadata fields that users set are unchanged."""
    return (
        old.labels == new.labels
        and old.annotations == new.annotations
        and old.finalizers == new.finalizers
        and old.owner_references == new.owner_references
    )


def _meta_problems(obj: Resource) -> list[FieldProblem]:
    meta = obj.metadata
    problems: list[FieldProblem] = _name_problems(obj)
    if obj.NAMESPACED and meta.namespace and (message := formats.dns_label(meta.namespace)):
        problems.append(FieldProblem("metadata.namespace", message))
    problems += [
        FieldProblem("metadata.labels", message)
        for key, value in meta.labels.items()
        for message in (formats.qualified_name(key), formats.label_value(value))
        if message
    ]
    problems += _annotation_problems(meta)
    for finalizer in meta.finalizers:
        if message := formats.qualified_name(finalizer):
            problems.append(FieldProblem("metadata.finalizers", message))
    for index, owner in enumerate(meta.owner_references):
        problems += [
            FieldProblem(f"metadata.ownerReferences[{index}].{field}", "must not be empty")
            for field, value in (
                ("apiVersion", owner.api_version),
                ("kind", owner.kind),
                ("name", owner.name),
                ("uid", owner.uid),
            )
            if not value
        ]
    return problems


def _name_problems(obj: Resource) -> list[FieldProblem]:
    meta = obj.metadata
    check = formats.dns_label if isinstance(obj, Namespace) else formats.dns_subdomain
    if meta.name:
        message = check(meta.name)
        return [FieldProblem("metadata.name", message)] if message else []
    if not meta.generate_name:
        return [FieldProblem("metadata.name", "name or generateName is required")]
    message = check(meta.generate_name.rstrip("-.") or "-")
    return [FieldProblem("metadata.generateName", message)] if message else []


def _annotation_problems(meta: ObjectMeta) -> list[FieldProblem]:
    problems = [
        FieldProblem("metadata.annotations", message)
        for key in meta.annotations
        if (message := formats.qualified_name(key.lower()))
    ]
    size = sum(len(key) + len(value.encode()) for key, value in meta.annotations.items())
    if size > MAX_ANNOTATION_BYTES:
        problems.append(
            FieldProblem(
                "metadata.annotations",
                f"are {size} bytes; must be at most {MAX_ANNOTATION_BYTES}",
            )
        )
    return problems
