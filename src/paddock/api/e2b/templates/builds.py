"""Routes for builds of templates: request, upload files, start, status, logs."""

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paddock.api.audit.e2b_calls import CALLS
from paddock.api.audit.notes import CALLER, notes_of
from paddock.api.e2b import query
from paddock.api.e2b.context import (
    E2bContext,
    RouteAccess,
    json_response,
    no_content,
    read_body,
    route,
)
from paddock.api.e2b.templates import views
from paddock.api.e2b.templates.schemas import (
    BuildLogsBody,
    BuildRequestBody,
    BuildRequestedBody,
    BuildStartBody,
    FileLinkBody,
    RegistryBody,
)
from paddock.api.login_limits import limited_address
from paddock.builds.aws.ecr import check_keys
from paddock.builds.aws.signature import AwsKeys
from paddock.builds.credentials import RegistryAccess, RegistryLogin
from paddock.builds.log_files import LEVELS
from paddock.claims.caller import Caller
from paddock.kit.errors import InvalidError
from paddock.manager.templates.build_requests import (
    DEFAULT_CPU_COUNT,
    DEFAULT_MEMORY_MB,
    BuildStart,
    NewBuild,
)
from paddock.manager.templates.names import aliases_of, names_of
from paddock.resources.kinds.template_build import BuildStep

_PUT_FILES = ("PUT", "/templates/uploads/{token}")
_GCP_USER = "_json_key"


def check_team(caller: Caller, team: str | None) -> None:
    """Raise `InvalidError` for a team other than the caller's."""
    if team and team != caller.team:
        raise InvalidError(f"team '{team}' is not the team of this API key, '{caller.team}'")


async def request_build(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Register a build of a template; the template is created if it does not exist."""
    wanted = await read_body(request, BuildRequestBody)
    check_team(caller, wanted.team_id)
    template, build = await context.manager.builds.request(
        caller,
        NewBuild(
            name=wanted.name or wanted.alias or "",
            tags=wanted.tags or (),
            cpu_count=DEFAULT_CPU_COUNT if wanted.cpu_count is None else wanted.cpu_count,
            memory_mb=DEFAULT_MEMORY_MB if wanted.memory_mb is None else wanted.memory_mb,
            free_disk_mb=wanted.min_free_disk_mb or 0,
        ),
    )
    notes_of(request.scope).name = template.metadata.name
    body = BuildRequestedBody(
        template_id=template.metadata.name,
        build_id=build.metadata.name,
        public=template.spec.public,
        names=names_of(template),
        tags=build.spec.tags,
        aliases=aliases_of(template),
    )
    return json_response(body, 202)


async def start_build(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Submit the steps of a registered build."""
    body = await read_body(request, BuildStartBody)
    steps = tuple(
        BuildStep(
            type=step.type,
            args=step.args or (),
            files_hash=step.files_hash or "",
            force=bool(step.force),
        )
        for step in body.steps or ()
    )
    wanted = BuildStart(
        from_image=body.from_image or "",
        from_template=body.from_template or "",
        steps=steps,
        force=bool(body.force),
        start_command=body.start_cmd or "",
        ready_command=body.ready_cmd or "",
        login=_login(body.from_image_registry, body.from_image or ""),
    )
    path = request.path_params
    await context.manager.builds.start(caller, path["id"], path["build"], wanted)
    return Response(status_code=202)


def _login(registry: RegistryBody | None, image: str) -> RegistryAccess | None:
    if registry is None:
        return None
    if registry.type == "registry":
        return RegistryLogin(username=registry.username, password=registry.password)
    if registry.type == "gcp":
        return RegistryLogin(username=_GCP_USER, password=registry.service_account_json)
    if registry.type == "aws":
        keys = AwsKeys(
            access_key_id=registry.aws_access_key_id,
            secret_access_key=registry.aws_secret_access_key,
            region=registry.aws_region,
        )
        check_keys(keys, image)
        return keys
    raise InvalidError.at("fromImageRegistry.type", "must be 'registry', 'gcp' or 'aws'")


async def build_status(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return the status of a build, and its log from an offset on."""
    params, path = request.query_params, request.path_params
    state = await context.manager.builds.state(
        caller,
        path["id"],
        path["build"],
        offset=query.number(params, "logsOffset", default=0, low=0, high=10**9),
        limit=_limit(params),
        level=_level(params),
    )
    return json_response(views.status(state))


async def build_logs(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return a page of the log of a build."""
    params, path = request.query_params, request.path_params
    direction = params.get("direction") or "forward"
    if direction not in ("forward", "backward"):
        raise InvalidError.at("direction", f"{direction!r} is neither forward nor backward")
    source = params.get("source") or "persistent"
    if source not in ("temporary", "persistent"):
        raise InvalidError.at("source", f"{source!r} is neither temporary nor persistent")
    cursor = query.number(params, "cursor", default=0, low=0, high=10**14)
    entries = await context.manager.builds.log(
        caller,
        path["id"],
        path["build"],
        cursor=datetime.fromtimestamp(cursor / 1000, UTC) if cursor else None,
        limit=_limit(params),
        level=_level(params),
        backward=direction == "backward",
    )
    return json_response(BuildLogsBody(logs=views.log_entries(entries)))


def _limit(params: Mapping[str, str]) -> int:
    return query.number(params, "limit", default=query.MAX_LIMIT, low=0, high=query.MAX_LIMIT)


def _level(params: Mapping[str, str]) -> str:
    level = params.get("level") or LEVELS[0]
    if level not in LEVELS:
        raise InvalidError.at("level", f"{level!r} is not one of {', '.join(LEVELS)}")
    return level


async def file_link(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return the URL to which the files of a step can be uploaded."""
    path = request.path_params
    token, is_present = context.manager.builds.offer(caller, path["id"], path["hash"])
    url = f"{_base_url(request)}/templates/uploads/{token}"
    return json_response(FileLinkBody(present=is_present, url=url), 201)


def _base_url(request: Request) -> str:
    """Return the URL of this API as the client sees it."""
    url = request.url
    forwarded = request.headers.get("x-forwarded-proto")
    scheme = forwarded if forwarded in ("http", "https") else url.scheme
    return f"{scheme}://{url.netloc}{request.scope.get('root_path', '')}"


async def upload_files(request: Request) -> Response:
    """Store the files of a step. The URL itself is the permission; there is no API key."""
    notes_of(request.scope).call = CALLS[_PUT_FILES]
    context: E2bContext = request.app.state.e2b
    token = request.path_params["token"]
    builds = context.manager.builds
    caller = context.logins.check(request, token, lambda: builds.uploader(token))
    request.scope[CALLER] = caller
    context.logins.calls.take(limited_address(request), caller.key_id)
    length = request.headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit() and len(length) < 19):
        raise InvalidError("Content-Length is not a number")
    await builds.upload(token, _chunks(request), length=None if length is None else int(length))
    return no_content()


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk


_CREATE = RouteAccess("create", "templatebuilds")
_GET = RouteAccess("get", "templatebuilds")
ROUTES = (
    route("/v3/templates", "POST", request_build, _CREATE),
    route("/v2/templates", "POST", request_build, _CREATE),
    route("/v2/templates/{id:path}/builds/{build}", "POST", start_build, _CREATE),
    route("/templates/{id:path}/builds/{build}/status", "GET", build_status, _GET),
    route("/templates/{id:path}/builds/{build}/logs", "GET", build_logs, _GET),
    route("/templates/{id:path}/files/{hash}", "GET", file_link, _CREATE),
    Route(_PUT_FILES[1], upload_files, methods=[_PUT_FILES[0]]),
)
