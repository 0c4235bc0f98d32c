"""Paths of the OpenAPI documents: the operations of each kind, with options and bodies.

In the form of version 3; `to_version_2` converts an operation to version 2. The schemas of kinds
are in `resources.schema.openapi`.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from paddock.api.kube.scheme import (
    SCALE_KIND,
    base_path,
    group_version,
    kind_reference,
    subresources,
)
from paddock.resources.registry import KindInfo
from paddock.store.port import Propagation

GVK = "x-kubernetes-group-version-kind"
META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
STATUS = "io.k8s.apimachinery.pkg.apis.meta.v1.Status"
DELETE_OPTIONS = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions"
SCALE = "io.k8s.api.autoscaling.v1.Scale"

Schema = dict[str, Any]
Reference = Callable[[str], Schema]
"""Returns a reference to the schema of that name."""

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_COUNT: Schema = {"type": "integer", "format": "int32", "minimum": 0}
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_MERGES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
_STEPS = "application/json-patch+json"
_STEP: Schema = {
    "type": "object",
    "required": ["op", "path"],
    "properties": {
        "op": {"type": "string", "enum": ["add", "remove", "replace", "move", "copy", "test"]},
        "path": _TEXT,
        "from": _TEXT,
        "value": {},
    },
}

_OPTIONS: dict[str, Schema] = {
    "allowWatchBookmarks": _FLAG,
    "continue": _TEXT,
    "dryRun": {"type": "string", "enum": ["All"]},
    "fieldManager": {"type": "string", "maxLength": 128},
    "fieldSelector": _TEXT,
    "fieldValidation": {"type": "string", "enum": ["Strict", "Warn", "Ignore"]},
    "force": _FLAG,
    "labelSelector": _TEXT,
    "limit": _NUMBER,
    "propagationPolicy": {"type": "string", "enum": [*Propagation]},
    "resourceVersion": _TEXT,
    "resourceVersionMatch": {"type": "string", "enum": ["Exact", "NotOlderThan"]},
    "sendInitialEvents": _FLAG,
    "timeoutSeconds": _NUMBER,
    "watch": _FLAG,
}
_WRITE = ("dryRun", "fieldManager", "fieldValidation")
_DELETE = ("dryRun", "propagationPolicy")
_SELECT = (
    *("continue", "fieldSelector", "labelSelector", "limit"),
    *("resourceVersion", "resourceVersionMatch"),
)
_LIST = (*_SELECT, "watch", "timeoutSeconds", "allowWatchBookmarks", "sendInitialEvents")


def schema_name(info: KindInfo) -> str:
    """Return the name of a kind's schema as in Kubernetes: reversed group, version, kind."""
    group, version = group_version(info)
    if group.endswith("k8s.io") or not group:
        return f"io.k8s.api.{group.partition('.')[0] or 'core'}.{version}.{info.kind}"
    return f"{'.'.join(reversed(group.split('.')))}.{version}.{info.kind}"


def paths(kinds: Iterable[KindInfo], reference: Reference) -> dict[str, Any]:
    """Return every path with its operations."""
    found: dict[str, Any] = {}
    for info in kinds:
        for path, operations in _Kind(info, reference).paths().items():
            named = [
                {"name": name, "in": "path", "required": True, "schema": _TEXT | {"minLength": 1}}
                for name in re.findall(r"{(\w+)}", path)
            ]
            found[path] = {
                method: operation | {"parameters": [*named, *operation["parameters"]]}
                for method, operation in operations.items()
            }
    return found


class _Kind:
    """The operations of one kind."""

    def __init__(self, info: KindInfo, reference: Reference) -> None:
        self._info = info
        self._object = reference(schema_name(info))
        self._list = reference(f"{schema_name(info)}List")
        self._scale = reference(SCALE)
        self._status = reference(STATUS)
        self._removal = {"content": {_JSON: {"schema": reference(DELETE_OPTIONS)}}}

    def paths(self) -> dict[str, dict[str, Any]]:
        """Return the operations on the collection, on one object, and on its subresources."""
        info = self._info
        root, plural = base_path(*group_version(info)), info.cls.PLURAL
        scope = "/namespaces/{namespace}" if info.cls.NAMESPACED else ""
        many = f"{root}{scope}/{plural}"
        found = {many: self._of_many(), f"{many}/{{name}}": self._of_one()}
        if scope:
            everywhere = self._operation("list", "list", options=_LIST, shown=self._list)
            everywhere["operationId"] = f"list{self._named('')}ForAllNamespaces"
            found[f"{root}/{plural}"] = {"get": everywhere}
        for part in subresources(info):
            of_part = self._of_scale() if part == "scale" else self._changed(part)
            found[f"{many}/{{name}}/{part}"] = of_part
        return found

    def _of_many(self) -> dict[str, Any]:
        return {
            "get": self._operation("list", "list", options=_LIST, shown=self._list),
            "post": self._operation(
                "post",
                "create",
                options=_WRITE,
                body=_whole(self._object),
                shown=self._object,
                codes=("201",),
            ),
            "delete": self._operation(
                "deletecollection",
                "deleteCollection",
                options=(*_DELETE, *_SELECT),
                body=self._removal,
                shown=self._list,
            ),
        }

    def _of_one(self) -> dict[str, Any]:
        # An object with finalizers is returned itself.
        shown = {"anyOf": [self._status, self._object]}
        delete = self._operation(
            "delete", "delete", options=_DELETE, body=self._removal, shown=shown
        )
        return {**self._changed(), "delete": delete}

    def _changed(self, part: str = "") -> dict[str, Any]:
        """Return the operations that read and change an object or its status."""
        shown = self._object
        return {
            "get": self._operation("get", "read", part, shown=shown),
            "put": self._operation(
                "put", "replace", part, options=_WRITE, body=_whole(shown), shown=shown
            ),
            "patch": self._operation(
                "patch",
                "patch",
                part,
                options=(*_WRITE, "force"),
                body=_patches(shown, with_apply=True),
                shown=shown,
                # Apply creates missing objects.
                codes=("200",) if part else ("200", "201"),
            ),
        }

    def _of_scale(self) -> dict[str, Any]:
        shown, part = self._scale, "scale"
        found = {
            "get": self._operation("get", "read", part, shown=shown),
            "put": self._operation(
                "put", "replace", part, options=("dryRun",), body=_whole(shown), shown=shown
            ),
            "patch": self._operation(
                "patch", "patch", part, options=("dryRun",), body=_patches(shown), shown=shown
            ),
        }
        return {method: operation | {GVK: SCALE_KIND} for method, operation in found.items()}

    def _operation(
        self,
        action: str,
        verb: str,
        part: str = "",
        *,
        options: tuple[str, ...] = (),
        body: Schema | None = None,
        shown: Schema,
        codes: tuple[str, ...] = ("200",),
    ) -> dict[str, Any]:
        scope = "Namespaced" if self._info.cls.NAMESPACED else ""
        refusal = {"description": "the error", "content": {_JSON: {"schema": self._status}}}
        response = {"description": "done", "content": {_JSON: {"schema": shown}}}
        operation = {
            "operationId": f"{verb}{self._named(scope)}{part.capitalize()}",
            "x-kubernetes-action": action,
            GVK: kind_reference(self._info),
            "parameters": [
                {"name": name, "in": "query", "schema": _OPTIONS[name]} for name in options
            ],
            "responses": dict.fromkeys(codes, response) | {"default": refusal},
        }
        return operation | {"requestBody": body} if body else operation

    def _named(self, scope: str) -> str:
        """Return the kind's name in operation ids, as in Kubernetes."""
        group, version = group_version(self._info)
        words = re.split(r"\W", f"{group.removesuffix('.k8s.io') or 'core'}.{version}")
        return "".join(word.capitalize() for word in words) + scope + self._info.kind


def _whole(schema: Schema) -> Schema:
    return {"required": True, "content": {_JSON: {"schema": schema}}}


def _patches(schema: Schema, *, with_apply: bool = False) -> Schema:
    # A patch may lack fields that the whole object requires.
    part: Schema = {"schema": {"anyOf": [{"type": "object"}, schema]}}
    content: dict[str, Schema] = dict.fromkeys(_MERGES, part)
    content[_STEPS] = {"schema": {"type": "array", "items": _STEP}}
    if with_apply:
        content[_APPLY] = {"schema": schema}
    return {"required": True, "content": content}


def to_version_2(operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation in the form of OpenAPI 2."""
    body = operation.get("requestBody")
    parameters = [
        {key: value for key, value in item.items() if key != "schema"} | item["schema"]
        for item in operation["parameters"]
    ]
    responses = {
        code: {"description": item["description"], "schema": _only(item["content"])}
        for code, item in operation["responses"].items()
    }
    converted = {key: value for key, value in operation.items() if key != "requestBody"}
    if body:
        shape = {"schema": _only(body["content"]), "required": body.get("required", False)}
        parameters.append({"name": "body", "in": "body"} | shape)
        converted["consumes"] = [*body["content"]]
    return converted | {"produces": [_JSON], "parameters": parameters, "responses": responses}


def _only(content: dict[str, Any]) -> Schema:
    """Return the first schema: version 2 has room for one only."""
    schema: Schema = next(iter(content.values()))["schema"]
    return schema["anyOf"][0] if "anyOf" in schema else schema


def shared_schemas(reference: Reference) -> dict[str, Schema]:
    """Return the schemas of Kubernetes' own types: DeleteOptions, Status, Scale."""
    counted: Schema = {"type": "object", "properties": {"replicas": _COUNT}}
    return {
        DELETE_OPTIONS: _document(
            "Options of a deletion.",
            dryRun={"type": "array", "items": _OPTIONS["dryRun"]},
            gracePeriodSeconds=_COUNT,
            orphanDependents=_FLAG,
            preconditions=_object(
                "Preconditions of the deletion.", uid=_TEXT, resourceVersion=_TEXT
            ),
            propagationPolicy=_OPTIONS["propagationPolicy"],
        ),
        STATUS: _document(
            "The result of a request.",
            metadata={"type": "object"},
            status={"type": "string", "enum": ["Success", "Failure"]},
            message=_TEXT,
            reason=_TEXT,
            code={"type": "integer", "format": "int32"},
            details={"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        ),
        SCALE: _document(
            "The desired and the current number of replicas.",
            metadata=reference(META),
            spec=counted,
            status={
                "type": "object",
                "properties": {"replicas": _COUNT, "selector": _TEXT},
            },
        )
        | {GVK: [SCALE_KIND]},
    }


def _object(description: str, **fields: Schema) -> Schema:
    return {"type": "object", "description": description, "properties": fields}


def _document(description: str, **fields: Schema) -> Schema:
    return _object(description, apiVersion=_TEXT, kind=_TEXT, **fields)
