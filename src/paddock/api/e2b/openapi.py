"""The OpenAPI document of E2B's API as served here, built from the routes and bodies."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paddock import __version__
from paddock.api.e2b import (
    batch,
    keys,
    metrics_logs,
    sandboxes,
    schemas,
    unsupported,
)
from paddock.api.e2b.context import E2bContext, json_response
from paddock.api.e2b.templates import routes as templates
from paddock.api.e2b.templates import schemas as template_schemas
from paddock.api.e2b.to_e2b import LEVELS

PREFIX = "/kruise/api"
"""The second prefix of every route."""
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")
_ERRORS = {
    "400": "the request is malformed; the message names the field",
    "401": "the API key is missing or unknown",
    "403": "the API key does not allow this",
    "404": "it does not exist, or belongs to another team",
    "405": "the path has no such method",
    "409": "the state does not allow this, or another call was first",
    "413": "the body is too large",
    "422": "the request is well-formed but cannot be fulfilled",
    "429": "a quota is used up, or too many calls at once",
    "503": "not possible right now; retry later",
    "504": "it took longer than allowed",
}

_BODIES: Mapping[str, type] = {
    "create_v2": schemas.CreateBody,
    "create_v1": schemas.CreateBody,
    "create_batch": batch.BatchBody,
    "pause": schemas.PauseBody,
    "resume": schemas.ResumeBody,
    "connect": schemas.ConnectBody,
    "set_timeout": schemas.TimeoutBody,
    "refresh": schemas.RefreshBody,
    "network": schemas.NetworkUpdate,
    "fork": schemas.ForkBody,
    "snapshot": schemas.SnapshotBody,
    "create_key": keys.NewKey,
    "change_key": keys.KeyPatch,
    "rotate_key": keys.KeyRotation,
    "publish": template_schemas.TemplatePatch,
    "request_build": template_schemas.BuildRequestBody,
    "start_build": template_schemas.BuildStartBody,
    "assign_tags": template_schemas.TagsBody,
    "remove_tags": template_schemas.RemovedTagsBody,
    "change_team": keys.TeamPatch,
}
_REQUIRED = {
    *("create_v2", "create_v1", "create_batch", "set_timeout"),
    *("create_key", "change_key", "change_team"),
    *("request_build", "start_build", "assign_tags", "remove_tags"),
}
_ANSWERS: Mapping[str, tuple[int, Any]] = {
    "create_v2": (201, schemas.SandboxBody),
    "create_v1": (201, schemas.SandboxBody),
    "create_batch": (201, batch.BatchResponse),
    "list_v2": (200, list[schemas.ListedSandbox]),
    "list_v1": (200, list[schemas.ListedSandbox]),
    "detail": (200, schemas.SandboxDetail),
    "kill": (204, None),
    "pause": (204, None),
    "resume": (201, schemas.SandboxBody),
    "connect": (200, schemas.SandboxBody),
    "set_timeout": (204, None),
    "refresh": (204, None),
    "network": (204, None),
    "show_network": (200, schemas.NetworkView),
    "fork": (201, list[dict[str, Any]]),
    "snapshot": (201, schemas.SnapshotInfo),
    "metrics": (200, list[schemas.MetricBody]),
    "snapshots": (200, list[schemas.SnapshotInfo]),
    "list_templates": (200, list[template_schemas.TemplateBody]),
    "page_templates": (200, list[template_schemas.TemplateBody]),
    "template": (200, template_schemas.TemplateDetail),
    "alias": (200, template_schemas.AliasBody),
    "request_build": (202, template_schemas.BuildRequestedBody),
    "start_build": (202, None),
    "build_status": (200, template_schemas.BuildStatusBody),
    "build_logs": (200, template_schemas.BuildLogsBody),
    "file_link": (201, template_schemas.FileLinkBody),
    "upload_files": (204, None),
    "assign_tags": (201, template_schemas.AssignedTagsBody),
    "remove_tags": (204, None),
    "list_tags": (200, list[template_schemas.TagBody]),
    "delete_template": (204, None),
    "create_key": (201, dict[str, Any]),
    "revoke_key": (204, None),
}
_NOT_OFFERED = "refuse"
"""The name of all handlers in `unsupported`."""
_PARTLY_OFFERED = {
    *("create_v2", "create_v1", "create_batch", "network"),  # some fields are not
    *("pause", "snapshot", "fork"),  # not by every runtime
}
_BUILDS = {
    "request_build",
    "start_build",
    "build_status",
    "build_logs",
    "file_link",
    "upload_files",
}
"""Offered where the runtime can build templates."""
_UPLOAD = "upload_files"
_TEXT = {"type": "string"}
_PAGES = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "nextToken": _TEXT,
}
_QUERIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "list_v2": {
        "metadata": _TEXT,
        "state": _TEXT,
        "template": _TEXT,
        "startedAfter": {"type": "string", "format": "date-time"},
        "order": {"type": "string", "enum": ["asc", "desc"]},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "nextToken": _TEXT,
    },
    "list_v1": {"metadata": _TEXT},
    "metrics": {"start": {"type": "integer"}, "end": {"type": "integer"}},
    "metrics_of_many": {"sandbox_ids": _TEXT},
    "logs_v1": {"start": {"type": "integer"}, "limit": {"type": "integer"}},
    "logs_v2": {
        "cursor": {"type": "integer"},
        "limit": {"type": "integer"},
        "direction": {"type": "string", "enum": ["forward", "backward"]},
        "level": {"type": "string", "enum": [*LEVELS]},
        "search": _TEXT,
    },
    "snapshots": {"sandboxID": _TEXT, "name": _TEXT, **_PAGES},
    "list_templates": {"teamID": _TEXT},
    "page_templates": {"teamID": _TEXT, **_PAGES},
    "build_status": {
        "logsOffset": {"type": "integer", "minimum": 0},
        "limit": {"type": "integer", "minimum": 0, "maximum": 100},
        "level": {"type": "string", "enum": [*LEVELS]},
    },
    "build_logs": {
        "cursor": {"type": "integer", "minimum": 0},
        "limit": {"type": "integer", "minimum": 0, "maximum": 100},
        "direction": {"type": "string", "enum": ["forward", "backward"]},
        "level": {"type": "string", "enum": [*LEVELS]},
        "source": {"type": "string", "enum": ["temporary", "persistent"]},
    },
}


def _routes() -> Iterator[Route]:
    yield from batch.ROUTES
    yield from metrics_logs.ROUTES
    yield from sandboxes.ROUTES
    yield from unsupported.ROUTES
    yield from templates.ROUTES
    yield from keys.ROUTES


@cache
def document(*, builds: bool = True) -> dict[str, Any]:
    """Return the document; `builds`: whether the runtime can build templates."""
    types = [*_BODIES.values(), *(kind for _, kind in _ANSWERS.values() if kind is not None)]
    shapes, components = msgspec.json.schema_components(
        [*types, schemas.ErrorBody], ref_template="#/components/schemas/{name}"
    )
    shape_of = dict(zip(map(str, [*types, schemas.ErrorBody]), shapes, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for item in _routes():
        path = _PARAMETER.sub(r"{\1}", item.path)
        for method in sorted((item.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {}).setdefault(
                method.lower(), _operation(item, shape_of, builds)
            )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paddock: E2B-compatible API", "version": __version__},
        "servers": [
            {"url": "/", "description": "as E2B's clients call it"},
            {"url": PREFIX, "description": "the same, below the prefix that other clients use"},
        ],
        "components": {
            "schemas": components,
            "securitySchemes": {"ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
        "security": [{"ApiKey": []}],
        "paths": paths,
    }


def _operation(item: Route, shape_of: Mapping[str, Any], builds: bool) -> dict[str, Any]:
    name = item.name
    error = {"application/json": {"schema": shape_of[str(schemas.ErrorBody)]}}
    responses: dict[str, Any] = {
        status: {"description": text, "content": error} for status, text in _ERRORS.items()
    }
    if name == _NOT_OFFERED or name in _PARTLY_OFFERED or (name in _BUILDS and not builds):
        text = "not supported; the message says what to do instead"
        responses["501"] = {"description": text, "content": error}
    status, kind = _ANSWERS.get(name, (200, None))
    if name != _NOT_OFFERED:
        responses[str(status)] = {"description": "done"}
    if kind is not None:
        content = {"application/json": {"schema": shape_of[str(kind)]}}
        responses[str(status)]["content"] = content
        if name == "connect":
            responses["201"] = {
                "description": "the sandbox was paused and has been resumed",
                "content": content,
            }
    operation: dict[str, Any] = {
        "summary": (item.endpoint.__doc__ or name).strip().splitlines()[0],
        "parameters": [*_path_parameters(item.path), *_query_parameters(name)],
        "responses": responses,
    }
    if name == _UPLOAD:
        operation["security"] = []
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": content}
    if name in _BODIES:
        operation["requestBody"] = {
            "required": name in _REQUIRED,
            "content": {"application/json": {"schema": shape_of[str(_BODIES[name])]}},
        }
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]


def _query_parameters(name: str) -> list[dict[str, Any]]:
    return [
        {"name": field, "in": "query", "required": False, "schema": schema}
        for field, schema in _QUERIES.get(name, {}).items()
    ]


async def serve(request: Request) -> Response:
    """Return the document."""
    context: E2bContext = request.app.state.e2b
    return json_response(document(builds=context.manager.builds.is_supported))
