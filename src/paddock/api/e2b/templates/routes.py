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
from paddock.api.e2b.templates import builds, tags, views
from paddock.api.e2b.templates.builds import check_team
from paddock.api.e2b.templates.schemas import AliasBody, TemplateBody, TemplatePatch
from paddock.claims.caller import Caller
from paddock.manager.templates.names import names_of
from paddock.resources.kinds.template import SandboxTemplate


def _body(context: E2bContext, item: SandboxTemplate) -> TemplateBody:
    return views.template(context.manager.templates.view(item))


async def list_templates(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List the templates that the caller may use."""
    check_team(caller, request.query_params.get("teamID"))
    found = context.manager.templates.list(caller)
    return json_response([_body(context, item) for item in found])


async def page_templates(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List the templates that the caller may use, newest first, page by page."""
    params = request.query_params
    check_team(caller, params.get("teamID"))
    limit = query.number(params, "limit", default=query.MAX_LIMIT, low=1, high=query.MAX_LIMIT)
    found, token = context.manager.templates.page(
        caller, limit=limit, token=params.get("nextToken") or None
    )
    headers = {"X-Next-Token": token} if token is not None else None
    return json_response([_body(context, item) for item in found], headers=headers)


async def template(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return one template with its builds."""
    found = context.manager.templates.get(caller, request.path_params["id"])
    return json_response(views.detail(context.manager.templates.view(found)))


async def alias(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return what an alias stands for: a template, a pool, an environment or a snapshot."""
    name, public = context.manager.templates.resolve_alias(caller, request.path_params["alias"])
    return json_response(AliasBody(template_id=name, public=public))


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
    return json_response({"names": names_of(changed)})


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


_LIST = RouteAccess("list", "sandboxtemplates")
ROUTES = (
    # In this order: aliases and ids may contain slashes.
    route("/templates/aliases/{alias:path}", "GET", alias, RouteAccess("get", "sandboxtemplates")),
    *builds.ROUTES,
    *tags.ROUTES,
    route("/templates", "GET", list_templates, _LIST),
    route("/v2/templates", "GET", page_templates, _LIST),
    route("/default-templates", "GET", list_templates, _LIST),
    route("/snapshots", "GET", snapshots, RouteAccess("list", "checkpoints")),
    route("/templates/{id:path}", "GET", template, RouteAccess("get", "sandboxtemplates")),
    route("/templates/{id:path}", "DELETE", delete_template, RouteAccess("delete", "checkpoints")),
    route("/templates/{id:path}", "PATCH", publish, RouteAccess("patch", "templates")),
    route("/v2/templates/{id:path}", "PATCH", publish, RouteAccess("patch", "templates")),
)
