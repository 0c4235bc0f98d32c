"""Routes for templates and snapshots."""

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.e2b import query, to_e2b
from paddock.api.e2b.context import (
    E2bContext,
    RouteAccess,
    json_response,
    no_content,
    read_body,
    route,
)
from paddock.api.e2b.schemas import TemplatePatch
from paddock.claims.caller import Caller


async def list_templates(context: E2bContext, _request: Request, caller: Caller) -> Response:
    """List the templates that the caller may use."""
    return json_response([to_e2b.template(item) for item in context.manager.templates.list(caller)])


async def template(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return one template with its builds."""
    found = context.manager.templates.get(caller, request.path_params["id"])
    shown = to_e2b.template(found)
    build = {
        "buildID": shown.build_id,
        "status": "ready",
        "createdAt": shown.created_at,
        "updatedAt": shown.updated_at,
        "cpuCount": shown.cpu_count,
        "memoryMB": shown.memory_mb,
        "diskSizeMB": shown.disk_size_mb,
        "envdVersion": shown.envd_version,
    }
    return json_response(
        {
            "templateID": shown.template_id,
            "public": shown.public,
            "aliases": shown.aliases,
            "names": shown.names,
            "createdAt": shown.created_at,
            "updatedAt": shown.updated_at,
            "lastSpawnedAt": None,
            "spawnCount": 0,
            "builds": [build],
        }
    )


async def alias(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return what an alias stands for: a template, a pool, an environment or a snapshot."""
    name, public = context.manager.templates.resolve_alias(caller, request.path_params["alias"])
    return json_response({"templateID": name, "public": public})


async def delete_template(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Delete a snapshot or template of the caller's team."""
    await context.manager.templates.delete(caller, request.path_params["id"])
    return no_content()


async def publish(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Make a template of the caller's team public, or private again."""
    wanted = await read_body(request, TemplatePatch)
    reference = request.path_params["id"]
    if wanted.public is None:
        changed = context.manager.templates.get(caller, reference)
    else:
        changed = await context.manager.templates.publish(caller, reference, public=wanted.public)
    return json_response({"names": to_e2b.template(changed).names})


async def snapshots(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List snapshots, page by page."""
    params = request.query_params
    limit = query.number(params, "limit", default=query.MAX_LIMIT, low=1, high=query.MAX_LIMIT)
    items, token = context.manager.snapshots.list(
        caller,
        sandbox_id=params.get("sandboxID") or None,
        name=params.get("name") or None,
        limit=limit,
        token=params.get("nextToken") or None,
    )
    headers = {"X-Next-Token": token} if token is not None else None
    return json_response([to_e2b.snapshot(item) for item in items], headers=headers)


ROUTES = (
    route("/templates", "GET", list_templates, RouteAccess("list", "sandboxtemplates")),
    route("/v2/templates", "GET", list_templates, RouteAccess("list", "sandboxtemplates")),
    route("/default-templates", "GET", list_templates, RouteAccess("list", "sandboxtemplates")),
    route("/templates/aliases/{alias:path}", "GET", alias, RouteAccess("get", "sandboxtemplates")),
    route("/snapshots", "GET", snapshots, RouteAccess("list", "checkpoints")),
    route("/templates/{id:path}", "GET", template, RouteAccess("get", "sandboxtemplates")),
    route("/templates/{id:path}", "DELETE", delete_template, RouteAccess("delete", "checkpoints")),
    route("/templates/{id:path}", "PATCH", publish, RouteAccess("patch", "templates")),
    route("/v2/templates/{id:path}", "PATCH", publish, RouteAccess("patch", "templates")),
)
