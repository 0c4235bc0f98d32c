"""Routes for tags of templates."""

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.audit.notes import notes_of
from paddock.api.e2b.context import (
    E2bContext,
    RouteAccess,
    json_response,
    no_content,
    read_body,
    route,
)
from paddock.api.e2b.templates.schemas import (
    AssignedTagsBody,
    RemovedTagsBody,
    TagBody,
    TagsBody,
)
from paddock.claims.caller import Caller


async def assign_tags(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Assign tags to the build that a name with or without a tag stands for."""
    wanted = await read_body(request, TagsBody)
    notes_of(request.scope).name = wanted.target
    build, tags = await context.manager.tags.assign(caller, wanted.target, wanted.tags)
    return json_response(AssignedTagsBody(tags=tags, build_id=build.metadata.name), 201)


async def remove_tags(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Remove tags from a template."""
    wanted = await read_body(request, RemovedTagsBody)
    notes_of(request.scope).name = wanted.name
    await context.manager.tags.remove(caller, wanted.name, wanted.tags)
    return no_content()


async def list_tags(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List the tags of a template with their builds."""
    found = context.manager.tags.list(caller, request.path_params["id"])
    return json_response(
        [TagBody(tag=item.tag, build_id=item.build, created_at=item.assigned_at) for item in found]
    )


ROUTES = (
    route("/templates/tags", "POST", assign_tags, RouteAccess("create", "templatebuilds")),
    route("/templates/tags", "DELETE", remove_tags, RouteAccess("delete", "templatebuilds")),
    route("/templates/{id:path}/tags", "GET", list_tags, RouteAccess("get", "templatebuilds")),
)
