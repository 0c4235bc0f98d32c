"""Predicates for lists and watches: namespace, labels and fields, evaluated on the structs.

A field's path uses the JSON names (`spec.templateRef.name`). Fields that hold their default match
too, although the encoding omits them.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any

from msgspec import Struct, structs

from paddock.kit.clock import rfc3339
from paddock.resources.meta import Resource
from paddock.resources.selectors import FieldSelector, FieldTerm, LabelSelector

Predicate = Callable[[Resource], bool]


def predicate(
    *,
    namespace: str | None = None,
    labels: LabelSelector | None = None,
    fields: FieldSelector | None = None,
) -> Predicate | None:
    """Return a predicate for objects, or `None` if every object matches."""
    tests: list[Predicate] = []
    if namespace:
        tests.append(lambda obj: obj.metadata.namespace == namespace)
    if labels is not None and labels.requirements:
        tests.append(lambda obj: labels.matches(obj.metadata.labels))
    if fields is not None:
        tests.extend(_field_test(term) for term in fields.terms)
    if not tests:
        return None
    if len(tests) == 1:
        return tests[0]
    return lambda obj: all(test(obj) for test in tests)


def _field_test(term: FieldTerm) -> Predicate:
    return lambda obj: matches_field(obj, term)


def matches_field(obj: Resource, term: FieldTerm) -> bool:
    """Whether an object matches one term of a field selector."""
    text = field_text(obj, term.path)
    return (text == term.value or (term.or_absent and not text)) is not term.negated


def field_text(obj: Resource, path: tuple[str, ...]) -> str:
    """Return a field as text; an absent field is ''."""
    if path == ("kind",):
        return obj.KIND
    if path == ("apiVersion",):
        return obj.API_VERSION
    value: Any = obj
    for part in path:
        if isinstance(value, Struct):
            name = _attributes(type(value)).get(part)
            value = None if name is None else getattr(value, name)
        elif isinstance(value, Mapping):
            value = value.get(part)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        else:
            return ""
    return _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, datetime):
        return rfc3339(value)
    return str(value)


@cache
def _attributes(cls: type[Struct]) -> dict[str, str]:
    return {field.encode_name: field.name for field in structs.fields(cls)}
