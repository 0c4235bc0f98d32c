"""Routes of sandboxes: create, look, extend, pause, wake, kill, fork."""

import re

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.e2b import from_e2b, query, to_e2b
from paddock.api.e2b.context import Context, answer, body, nothing, route
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
from paddock.claims.caller import Caller, Role
from paddock.claims.requests import DEFAULT_TIMEOUT_SECONDS
from paddock.kit.errors import InvalidError, PaddockError
from paddock.resources.kinds.template import NetworkPolicy

V1_TIMEOUT_SECONDS = 15
"""What a v1 body without a timeout means."""
_IDEMPOTENCY_KEY = re.compile(r"^[a-zA-Z0-9_-]{1,255}$")


async def _create(context: Context, request: Request, caller: Caller, default: int) -> Response:
    wanted = await body(request, CreateBody)
    key = request.headers.get("idempotency-key", "")
    if key and not _IDEMPOTENCY_KEY.match(key):
        raise InvalidError.at("Idempotency-Key", "up to 255 letters, digits, dashes or underscores")
    sandbox = await context.manager.create(
        caller, from_e2b.new_sandbox(wanted, default_timeout=default, idempotency_key=key)
    )
    created = context.shown.created(sandbox)
    request.state.made = created.sandbox_id
    return answer(created, 201)


async def create_v2(context: Context, request: Request, caller: Caller) -> Response:
    """Create a sandbox."""
    return await _create(context, request, caller, DEFAULT_TIMEOUT_SECONDS)


async def create_v1(context: Context, request: Request, caller: Caller) -> Response:
    """Create a sandbox (older clients)."""
    return await _create(context, request, caller, V1_TIMEOUT_SECONDS)


async def list_v2(context: Context, request: Request, caller: Caller) -> Response:
    """List sandboxes, page by page."""
    limit = query.number(
        request.query_params, "limit", default=query.MAX_LIMIT, low=1, high=query.MAX_LIMIT
    )
    page = context.manager.list(
        caller,
        query.sandbox_filter(request.query_params),
        limit=limit,
        token=request.query_params.get("nextToken") or None,
        ascending=query.is_ascending(request.query_params),
    )
    headers = {"X-Total-Running": str(page.total_running)}
    if page.next_token is not None:
        headers["X-Next-Token"] = page.next_token
    return answer([context.shown.listed(item) for item in page.items], headers=headers)


async def list_v1(context: Context, request: Request, caller: Caller) -> Response:
    """List running sandboxes (older clients)."""
    wanted = query.sandbox_filter({**request.query_params, "state": "running"})
    items = context.manager.all(caller, wanted)
    return answer([context.shown.listed(item) for item in items])


async def detail(context: Context, request: Request, caller: Caller) -> Response:
    """Show one sandbox."""
    sandbox = await context.manager.get(caller, request.path_params["id"])
    may_act = caller.role is not Role.READER
    return answer(context.shown.detail(sandbox, with_token=may_act))


async def kill(context: Context, request: Request, caller: Caller) -> Response:
    """End a sandbox, running or paused."""
    await context.manager.kill(caller, request.path_params["id"])
    return nothing()


async def pause(context: Context, request: Request, caller: Caller) -> Response:
    """Pause a sandbox; it is paused when this answers."""
    wanted = await body(request, PauseBody, default=PauseBody())
    header = "x-e2b-kruise-reserve-paused-sandbox-duration"
    kept = request.headers.get(header)
    await context.manager.pause(
        caller,
        request.path_params["id"],
        memory=wanted.memory is not False,
        retention_seconds=duration(header, kept) if kept else ...,
    )
    return nothing()


async def resume(context: Context, request: Request, caller: Caller) -> Response:
    """Resume a paused sandbox (older clients); a running one is a conflict."""
    wanted = await body(request, ResumeBody, default=ResumeBody())
    sandbox = await context.manager.resume(
        caller,
        request.path_params["id"],
        timeout_seconds=V1_TIMEOUT_SECONDS if wanted.timeout is None else wanted.timeout,
        auto_pause=wanted.auto_pause,
    )
    return answer(context.shown.created(sandbox), 201)


async def connect(context: Context, request: Request, caller: Caller) -> Response:
    """Extend a running sandbox or resume a paused one."""
    wanted = await body(request, ConnectBody, default=ConnectBody())
    sandbox, resumed = await context.manager.connect(
        caller,
        request.path_params["id"],
        timeout_seconds=DEFAULT_TIMEOUT_SECONDS if wanted.timeout is None else wanted.timeout,
    )
    return answer(context.shown.created(sandbox), 201 if resumed else 200)


async def set_timeout(context: Context, request: Request, caller: Caller) -> Response:
    """Let a sandbox end so many seconds from now."""
    wanted = await body(request, TimeoutBody)
    await context.manager.set_timeout(
        caller, request.path_params["id"], timeout_seconds=wanted.timeout
    )
    return nothing()


async def refresh(context: Context, request: Request, caller: Caller) -> Response:
    """Let a sandbox live at least so many seconds more."""
    wanted = await body(request, RefreshBody, default=RefreshBody())
    await context.manager.refresh(
        caller, request.path_params["id"], seconds=wanted.duration or V1_TIMEOUT_SECONDS
    )
    return nothing()


async def network(context: Context, request: Request, caller: Caller) -> Response:
    """Replace a sandbox's egress policy."""
    wanted = await body(request, NetworkUpdate, default=NetworkUpdate())
    config = NetworkConfig(
        allow_out=wanted.allow_out,
        deny_out=wanted.deny_out,
        dns_servers=wanted.dns_servers,
        egress_proxy=wanted.egress_proxy,
        rules=wanted.rules,
    )
    policy = from_e2b.network(config, wanted.allow_internet_access) or NetworkPolicy()
    await context.manager.set_network(caller, request.path_params["id"], policy)
    return nothing()


async def fork(context: Context, request: Request, caller: Caller) -> Response:
    """Make clones of a running sandbox; each succeeds or fails by itself."""
    wanted = await body(request, ForkBody, default=ForkBody())
    results = await context.manager.fork(
        caller,
        request.path_params["id"],
        count=wanted.count,
        timeout_seconds=V1_TIMEOUT_SECONDS if wanted.timeout is None else wanted.timeout,
    )
    made = [
        context.shown.created(result.sandbox) if result.sandbox is not None else None
        for result in results
    ]
    request.state.made = ",".join(item.sandbox_id for item in made if item is not None)
    return answer(
        [
            {"sandbox": item} if item is not None else {"error": _refusal(result.error)}
            for item, result in zip(made, results, strict=True)
        ],
        201,
    )


def _refusal(error: PaddockError | None) -> dict[str, object]:
    """Tell why one fork failed as it would be told if it had been asked for alone."""
    error = error or PaddockError("unknown")
    return {"code": status_of(error), "message": error.message}


async def snapshot(context: Context, request: Request, caller: Caller) -> Response:
    """Store a sandbox's state as something to create from."""
    wanted = await body(request, SnapshotBody, default=SnapshotBody())
    checkpoint = await context.manager.snapshot(
        caller, request.path_params["id"], name=wanted.name, memory=wanted.memory is not False
    )
    shown = to_e2b.snapshot(checkpoint)
    request.state.made = shown.snapshot_id
    return answer(shown, 201)


ROUTES = (
    route("/v2/sandboxes", "POST", create_v2),
    route("/sandboxes", "POST", create_v1),
    route("/v2/sandboxes", "GET", list_v2),
    route("/sandboxes", "GET", list_v1),
    route("/sandboxes/{id}", "GET", detail),
    route("/sandboxes/{id}", "DELETE", kill),
    route("/sandboxes/{id}/pause", "POST", pause),
    route("/sandboxes/{id}/resume", "POST", resume),
    route("/sandboxes/{id}/connect", "POST", connect),
    route("/v2/sandboxes/{id}/connect", "POST", connect),
    route("/sandboxes/{id}/timeout", "POST", set_timeout),
    route("/sandboxes/{id}/refreshes", "POST", refresh),
    route("/sandboxes/{id}/network", "PUT", network),
    route("/sandboxes/{id}/fork", "POST", fork),
    route("/sandboxes/{id}/snapshots", "POST", snapshot),
)
