"""OpenAPI documents, for `kubectl explain`, client generators and client-side validation.

Version 3 has one document per group version, with a hash in its URL so that clients cache it.
Version 2 is one document, which older clients read in its binary form (`openapi.protobuf`).
"""

import hashlib
from functools import cache
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from paddock import __version__
from paddock.api.kube.context import json_response
from paddock.api.kube.openapi.paths import (
    GVK,
    META,
    paths,
    schema_name,
    shared_schemas,
    to_version_2,
)
from paddock.api.kube.openapi.protobuf import encode_document
from paddock.api.kube.scheme import GROUP_VERSIONS, base_path, kind_reference
from paddock.kit.errors import NotFoundError
from paddock.resources.meta import ObjectMeta
from paddock.resources.registry import ALL, KindInfo
from paddock.resources.schema.openapi import schema_of_kind, schema_of_struct

_LIST_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta"
_BINARY = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_BINARY_NAMES = (_BINARY, "application/com.github.proto-openapi.spec.v2@v1.0+protobuf")
"""Clients accept the second name too, but cannot parse it in a response, because of the `@`."""
_INFO = {"title": "Paddock", "version": f"v{__version__}"}
_BEARER = "BearerToken"
_V2, _V3 = "#/definitions/", "#/components/schemas/"


def _schemas(kinds: tuple[KindInfo, ...], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        **shared_schemas(lambda name: _reference(prefix, name)),
        META: _metadata_schema(),
        _LIST_META: {
            "type": "object",
            "description": "Where a list continues, and the version to watch it from.",
            "properties": {
                "continue": {"type": "string"},
                "remainingItemCount": {"type": "integer", "format": "int64"},
                "resourceVersion": {"type": "string"},
            },
        },
    }
    for info in kinds:
        name, reference = schema_name(info), kind_reference(info)
        schema = schema_of_kind(info.cls)
        schema["properties"] = {**schema["properties"], "metadata": _reference(prefix, META)}
        found[name] = {**schema, GVK: [reference]}
        found[f"{name}List"] = {
            "type": "object",
            "description": f"A list of {info.kind} objects.",
            "required": ["items"],
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": _reference(prefix, _LIST_META),
                "items": {"type": "array", "items": _reference(prefix, name)},
            },
            GVK: [{**reference, "kind": f"{info.kind}List"}],
        }
    return found


def _metadata_schema() -> dict[str, Any]:
    schema = schema_of_struct(ObjectMeta)
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema["properties"]["managedFields"] = {
        "type": "array",
        "items": free,
        "description": "Who applied which fields.",
    }
    schema["properties"]["selfLink"] = {"type": "string", "description": "No longer set."}
    assert {field.encode_name for field in structs.fields(ObjectMeta)} <= set(schema["properties"])  # noqa: S101
    return schema


def _reference(prefix: str, name: str) -> dict[str, Any]:
    return {"$ref": f"{prefix}{name}"}


@cache
def document_v3(group: str, version: str) -> bytes:
    """Return the OpenAPI 3 document of one group version."""
    kinds = GROUP_VERSIONS[group, version]
    return msgspec.json.encode(
        {
            "openapi": "3.0.0",
            "info": _INFO,
            "security": [{_BEARER: []}],
            "paths": paths(kinds, lambda name: _reference(_V3, name)),
            "components": {
                "schemas": _schemas(kinds, _V3),
                "securitySchemes": {_BEARER: {"type": "http", "scheme": "bearer"}},
            },
        }
    )


@cache
def document_v2() -> dict[str, Any]:
    """Return the OpenAPI 2 document."""
    header = {"type": "apiKey", "name": "authorization", "in": "header"}
    return {
        "swagger": "2.0",
        "info": _INFO,
        "securityDefinitions": {_BEARER: header},
        "security": [{_BEARER: []}],
        "paths": {
            path: {method: to_version_2(operation) for method, operation in operations.items()}
            for path, operations in paths(ALL, lambda name: _reference(_V2, name)).items()
        },
        "definitions": _schemas(ALL, _V2),
    }


@cache
def binary_v2() -> bytes:
    """Return the OpenAPI 2 document in its binary form."""
    return encode_document(document_v2())


@cache
def _index() -> dict[str, Any]:
    return {
        "paths": {
            path: {"serverRelativeURL": f"/openapi/v3/{path}?hash={_hash(document_v3(*key))}"}
            for key in GROUP_VERSIONS
            for path in [base_path(*key).strip("/")]
        }
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest().upper()


async def serve_index(_: Request) -> Response:
    """Serve the index of documents."""
    return json_response(_index())


async def serve_v3(request: Request) -> Response:
    """Serve the document of one group version."""
    path = request.path_params["path"].strip("/")
    key = next((key for key in GROUP_VERSIONS if base_path(*key).strip("/") == path), None)
    if key is None:
        raise NotFoundError(f"there is no OpenAPI document for {path[:200]}")
    data = document_v3(*key)
    headers = {"ETag": f'"{_hash(data)}"', "Vary": "Accept"}
    if request.query_params.get("hash"):
        headers["Cache-Control"] = "public, immutable, max-age=31536000"
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)


async def serve_v2(request: Request) -> Response:
    """Serve the OpenAPI 2 document, in the form that the client accepts."""
    wanted = request.headers.get("accept", "")
    if any(name in wanted for name in _BINARY_NAMES):
        return Response(binary_v2(), media_type=_BINARY)
    return json_response(document_v2())
