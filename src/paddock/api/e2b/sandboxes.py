"""Routes for sandboxes: create, list, extend, pause, resume, kill, fork, snapshot."""

import re

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.audit.notes import notes_of
from paddock.api.e2b import from_e2b, query, to_e2b
from paddock.api.e2b.context import (
    E2bContext,
    RouteAccess,
    json_response,
    no_content,
    read_body,
    route,
)
from paddock.api.e2b.extensions import duration
from paddock.api.e2b.schemas import (
    ConnectBody,
    CreateBody,
    ForkBody,
    NetworkConfig,
    NetworkUpdate,
    PauseBody,
    RefreshBody,
    ResumeBody,
    SnapshotBody,
    TimeoutBody,
)
from paddock.api.errors import status_of
from paddock.claims.caller import Caller
from paddock.claims.requests import DEFAULT_TIMEOUT_SECONDS
from paddock.kit.errors import InvalidError, PaddockError
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.ceiling import INTERNET

V1_TIMEOUT_SECONDS = 15
"""The default timeout of a v1 body."""
_IDEMPOTENCY_KEY = re.compile(r"^[a-zA-Z0-9_-]{1,255}$")


async def _create(context: E2bContext, request: Request, caller: Caller, default: int) -> Response:
    wanted = await read_body(request, CreateBody)
    key = request.headers.get("idempotency-key", "")
    if key and not _IDEMPOTENCY_KEY.match(key):
        raise InvalidError.at("Idempotency-Key", "up to 255 letters, digits, dashes or underscores")
    sandbox = await context.manager.claims.create(
        caller, from_e2b.new_sandbox(wanted, default_timeout=default, idempotency_key=key)
    )
    created = context.renderer.created(sandbox)
    notes_of(request.scope).created = (created.sandbox_id,)
    return json_response(created, 201)


async def create_v2(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Create a sandbox."""
    return await _create(context, request, caller, DEFAULT_TIMEOUT_SECONDS)


async def create_v1(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Create a sandbox (older clients)."""
    return await _create(context, request, caller, V1_TIMEOUT_SECONDS)


async def list_v2(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List sandboxes, page by page."""
    limit = query.number(
        request.query_params, "limit", default=query.MAX_LIMIT, low=1, high=query.MAX_LIMIT
    )
    page = context.manager.queries.page(
        caller,
        query.sandbox_filter(request.query_params),
        limit=limit,
        token=request.query_params.get("nextToken") or None,
        ascending=query.is_ascending(request.query_params),
    )
    headers = {"X-Total-Running": str(page.total_running)}
    if page.next_token is not None:
        headers["X-Next-Token"] = page.next_token
    return json_response([context.renderer.listed(item) for item in page.items], headers=headers)


async def list_v1(context: E2bContext, request: Request, caller: Caller) -> Response:
    """List running sandboxes (older clients)."""
    wanted = query.sandbox_filter({**request.query_params, "state": "running"})
    items = context.manager.queries.all(caller, wanted)
    return json_response([context.renderer.listed(item) for item in items])


async def detail(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return one sandbox."""
    sandbox = await context.manager.queries.get(caller, request.path_params["id"])
    policy = context.manager.networks.effective(sandbox)
    may_act = caller.may("create", "sandboxes/connect")
    return json_response(context.renderer.detail(sandbox, policy, with_token=may_act))


async def kill(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Kill a sandbox, running or paused."""
    await context.manager.lifecycle.kill(caller, request.path_params["id"])
    return no_content()


async def pause(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Pause a sandbox; it is paused when the call returns."""
    wanted = await read_body(request, PauseBody, default=PauseBody())
    header = "x-e2b-kruise-reserve-paused-sandbox-duration"
    kept = request.headers.get(header)
    await context.manager.lifecycle.pause(
        caller,
        request.path_params["id"],
        memory=wanted.memory is not False,
        retention_seconds=duration(header, kept) if kept else ...,
    )
    return no_content()


async def resume(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Resume a paused sandbox (older clients); a running one is a conflict."""
    wanted = await read_body(request, ResumeBody, default=ResumeBody())
    sandbox = await context.manager.lifecycle.resume(
        caller,
        request.path_params["id"],
        timeout_seconds=V1_TIMEOUT_SECONDS if wanted.timeout is None else wanted.timeout,
        auto_pause=wanted.auto_pause,
    )
    return json_response(context.renderer.created(sandbox), 201)


async def connect(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Extend a running sandbox or resume a paused one."""
    wanted = await read_body(request, ConnectBody, default=ConnectBody())
    sandbox, resumed = await context.manager.lifecycle.connect(
        caller,
        request.path_params["id"],
        timeout_seconds=DEFAULT_TIMEOUT_SECONDS if wanted.timeout is None else wanted.timeout,
    )
    return json_response(context.renderer.created(sandbox), 201 if resumed else 200)


async def set_timeout(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Set a sandbox's timeout, in seconds from now."""
    wanted = await read_body(request, TimeoutBody)
    await context.manager.lifecycle.set_timeout(
        caller, request.path_params["id"], timeout_seconds=wanted.timeout
    )
    return no_content()


async def refresh(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Extend a sandbox's timeout to at least this many seconds from now."""
    wanted = await read_body(request, RefreshBody, default=RefreshBody())
    await context.manager.lifecycle.refresh(
        caller, request.path_params["id"], seconds=wanted.duration or V1_TIMEOUT_SECONDS
    )
    return no_content()


async def network(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Replace a sandbox's egress policy."""
    wanted = await read_body(request, NetworkUpdate, default=NetworkUpdate())
    config = NetworkConfig(
        allow_out=wanted.allow_out,
        deny_out=wanted.deny_out,
        dns_servers=wanted.dns_servers,
        egress_proxy=wanted.egress_proxy,
        rules=wanted.rules,
    )
    policy = from_e2b.network(config, wanted.allow_internet_access) or NetworkPolicy()
    opens = (INTERNET,) if wanted.allow_internet_access else ()
    await context.manager.networks.change(caller, request.path_params["id"], policy, opens)
    return no_content()


async def show_network(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return the network policy in effect, and the parts of which it is the intersection."""
    effective, parts = context.manager.networks.parts(caller, request.path_params["id"])
    return json_response(to_e2b.network_view(effective, parts))


async def fork(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Create clones of a running sandbox; each succeeds or fails on its own."""
    wanted = await read_body(request, ForkBody, default=ForkBody())
    results = await context.manager.snapshots.fork(
        caller,
        request.path_params["id"],
        count=wanted.count,
        timeout_seconds=V1_TIMEOUT_SECONDS if wanted.timeout is None else wanted.timeout,
    )
    made = [
        context.renderer.created(result.sandbox) if result.sandbox is not None else None
        for result in results
    ]
    notes = notes_of(request.scope)
    notes.created = [item.sandbox_id for item in made if item is not None]
    notes.requested = wanted.count
    return json_response(
        [
            {"sandbox": item} if item is not None else {"error": _refusal(result.error)}
            for item, result in zip(made, results, strict=True)
        ],
        201,
    )


def _refusal(error: PaddockError | None) -> dict[str, object]:
    """Return the error body of one failed fork."""
    error = error or PaddockError("unknown")
    return {"code": status_of(error), "message": error.message}


async def snapshot(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Store a sandbox's state as a snapshot to create sandboxes from."""
    wanted = await read_body(request, SnapshotBody, default=SnapshotBody())
    checkpoint = await context.manager.snapshots.create(
        caller, request.path_params["id"], name=wanted.name, memory=wanted.memory is not False
    )
    shown = to_e2b.snapshot(checkpoint)
    notes_of(request.scope).created = (shown.snapshot_id,)
    return json_response(shown, 201)


ROUTES = (
    route("/v2/sandboxes", "POST", create_v2, RouteAccess("create", "sandboxclaims")),
    route("/sandboxes", "POST", create_v1, RouteAccess("create", "sandboxclaims")),
    route("/v2/sandboxes", "GET", list_v2, RouteAccess("list", "sandboxes")),
    route("/sandboxes", "GET", list_v1, RouteAccess("list", "sandboxes")),
    route("/sandboxes/{id}", "GET", detail, RouteAccess("get", "sandboxes")),
    route("/sandboxes/{id}", "DELETE", kill, RouteAccess("delete", "sandboxes")),
    route("/sandboxes/{id}/pause", "POST", pause, RouteAccess("create", "sandboxes/pause")),
    route("/sandboxes/{id}/resume", "POST", resume, RouteAccess("create", "sandboxes/resume")),
    route("/sandboxes/{id}/connect", "POST", connect, RouteAccess("create", "sandboxes/connect")),
    route(
        "/v2/sandboxes/{id}/connect", "POST", connect, RouteAccess("create", "sandboxes/connect")
    ),
    route(
        "/sandboxes/{id}/timeout", "POST", set_timeout, RouteAccess("create", "sandboxes/timeout")
    ),
    route(
        "/sandboxes/{id}/refreshes", "POST", refresh, RouteAccess("create", "sandboxes/refreshes")
    ),
    route("/sandboxes/{id}/network", "GET", show_network, RouteAccess("get", "sandboxes/network")),
    route("/sandboxes/{id}/network", "PUT", network, RouteAccess("update", "sandboxes/network")),
    route("/sandboxes/{id}/fork", "POST", fork, RouteAccess("create", "sandboxes/fork")),
    route(
        "/sandboxes/{id}/snapshots", "POST", snapshot, RouteAccess("create", "sandboxes/snapshots")
    ),
)
