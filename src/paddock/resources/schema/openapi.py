"""OpenAPI v3 schemas of the structs, structural as Kubernetes requires.

One generator for CRDs and for the embedded API: types from the annotations, limits from
`constraints`, rules between fields as CEL from `rules`, descriptions from the docstrings. Lists are
atomic, which keeps objects small and writes cheap on the API server.
"""

import types
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Struct, structs

from paddock.resources.kinds.batch import BatchSandboxSpec
from paddock.resources.kinds.claim import SandboxClaimSpec
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Resource
from paddock.resources.schema.constraints import FieldLimit, limit_of
from paddock.resources.schema.docstrings import class_docstring, field_docstrings
from paddock.resources.schema.formats import MAX_LABEL
from paddock.resources.schema.rules import NAMES_LABEL, RULES, TRANSITIONS

Schema = dict[str, Any]

DEFAULTED: Mapping[type[Struct], frozenset[str]] = {
    SandboxTemplateSpec: frozenset({"image"}),
    SandboxClaimSpec: frozenset({"replicas"}),
    BatchSandboxSpec: frozenset({"replicas"}),
}
"""Fields whose default the API server writes into objects, because printer columns and `scale` read
them.

Other defaults are left out, which keeps stored objects small.
"""

_SCALARS: dict[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": "int64"},
    float: {"type": "number", "format": "double"},
    datetime: {"type": "string", "format": "date-time"},
}
_LIMIT_NAMES = (
    ("min_length", "minLength"),
    ("max_length", "maxLength"),
    ("min_items", "minItems"),
    ("max_items", "maxItems"),
    ("max_properties", "maxProperties"),
    ("pattern", "pattern"),
)
_ROOT_FIELDS: dict[str, Schema] = {
    "apiVersion": {
        "type": "string",
        "description": "API version of the schema of this object.",
    },
    "kind": {"type": "string", "description": "Kind of this object."},
}


def schema_of_kind(cls: type[Resource]) -> Schema:
    """Return the structural schema of a kind, for its CRD."""
    schema = schema_of_struct(cls)
    metadata: Schema = {"type": "object"}
    if cls in NAMES_LABEL:
        metadata["properties"] = {"name": {"type": "string", "maxLength": MAX_LABEL}}
    schema["properties"] = _ROOT_FIELDS | {"metadata": metadata} | _without_root(schema)
    if "spec" in schema["properties"] and cls is not SandboxTemplate:
        schema["required"] = ["spec"]
    return schema


def schema_of_struct(cls: type[Struct], *, is_item: bool = False) -> Schema:
    """Return the schema of a struct, including everything inside it.

    Within an item of a list or mapping, costly rules are left out: the API server multiplies their
    estimated cost by the maximum number of items, and rejects the whole definition.
    """
    hints, notes = get_type_hints(cls), field_docstrings(cls)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for field in structs.fields(cls):
        schema = _schema(hints[field.name], limit_of(cls, field.name), is_item=is_item)
        if note := _note(notes.get(field.name, ""), schema.get("description", "")):
            schema = {**schema, "description": note}
        if field.name in DEFAULTED.get(cls, ()):
            schema = {**schema, "default": field.default}
        properties[field.encode_name] = schema
        if field.default is NODEFAULT and field.default_factory is NODEFAULT:
            required.append(field.encode_name)
    schema: Schema = {
        "type": "object",
        "description": class_docstring(cls),
        "properties": properties,
    }
    if required:
        schema["required"] = required
    if rules := _rules(cls, is_item=is_item):
        schema["x-kubernetes-validations"] = rules
    return schema


def _without_root(schema: Schema) -> dict[str, Schema]:
    properties: dict[str, Schema] = schema["properties"]
    return {
        name: value
        for name, value in properties.items()
        if name not in ("apiVersion", "kind", "metadata")
    }


def _note(field: str, kind: str) -> str:
    """Join the descriptions of a field and of its type, the field first."""
    return f"{field} {kind}".strip() if field != kind else field


def _schema(hint: Any, limit: FieldLimit | None, *, is_item: bool = False) -> Schema:
    options = _options(hint)
    if len(options) > 1:
        return {"x-kubernetes-int-or-string": True} | _limits(limit)
    kind = options[0]
    if kind in _SCALARS:
        return _SCALARS[kind] | _limits(limit, is_text=kind is str, is_number=kind in (int, float))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum(kind)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return schema_of_struct(kind, is_item=is_item)
    return _container(kind, limit)


def _options(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [option for option in get_args(hint) if option is not types.NoneType]
    return [hint]


def _container(hint: Any, limit: FieldLimit | None) -> Schema:
    arguments = get_args(hint)
    inner = limit.items if limit else None
    if get_origin(hint) is tuple:
        return {
            "type": "array",
            "items": _schema(arguments[0], inner, is_item=True),
            "x-kubernetes-list-type": "atomic",
        } | _limits(limit, is_list=True)
    if arguments and arguments[1] is not Any:
        return {
            "type": "object",
            "additionalProperties": _schema(arguments[1], inner, is_item=True),
        } | _limits(limit, is_mapping=True)
    return _free()


def _free() -> Schema:
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _enum(kind: type[StrEnum]) -> Schema:
    notes = field_docstrings(kind)
    members = " ".join(
        f"`{member.value}`: {notes[member.name]}" for member in kind if member.name in notes
    )
    return {
        "type": "string",
        "enum": [member.value for member in kind],
        "description": _note(class_docstring(kind), members),
    }


def _limits(
    limit: FieldLimit | None,
    *,
    is_text: bool | None = None,
    is_number: bool | None = None,
    is_list: bool = False,
    is_mapping: bool = False,
) -> Schema:
    """Return a limit as OpenAPI keywords, as far as they apply to a value of this type."""
    if limit is None:
        return {}
    either = is_text is None and is_number is None and not is_list and not is_mapping
    found: Schema = {}
    if either or is_number:
        found |= _bounds(limit)
    wanted = {
        "min_length": either or is_text,
        "max_length": either or is_text,
        "pattern": either or is_text,
        "min_items": is_list,
        "max_items": is_list,
        "max_properties": is_mapping,
    }
    for attribute, name in _LIMIT_NAMES:
        value = getattr(limit, attribute)
        if wanted[attribute] and value is not None:
            found[name] = value
    if limit.choices and is_text:
        found["enum"] = list(limit.choices)
    return found


def _bounds(limit: FieldLimit) -> Schema:
    found: Schema = {}
    if limit.minimum is not None:
        found["minimum"] = int(limit.minimum)
        if limit.is_above:
            found["exclusiveMinimum"] = True
    if limit.maximum is not None:
        found["maximum"] = int(limit.maximum)
    return found


def _rules(cls: type[Struct], *, is_item: bool) -> list[Schema]:
    standing = [rule for rule in RULES.get(cls, ()) if not (is_item and rule.is_costly)]
    rules = [*standing, *TRANSITIONS.get(cls, ())]
    return [
        {"rule": rule.cel, "message": rule.message, "fieldPath": f".{rule.path}"}
        for rule in rules
        if rule.cel
    ]
