"""Routes of sandboxes: create, look, extend, pause, wake, kill, fork."""

import math
import re

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.e2b import convert, query
from paddock.api.e2b.context import Context, answer, body, nothing, route
from paddock.api.e2b.extensions import apply_extensions, duration
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
from paddock.kit.errors import FieldProblem, InvalidError, PaddockError, UnsupportedError
from paddock.manager.keys import Caller, Role
from paddock.manager.requests import DEFAULT_TIMEOUT_SECONDS, NewSandbox
from paddock.resources.template import NetworkPolicy

V1_TIMEOUT_SECONDS = 15
"""What a v1 body without a timeout means."""
MAX_LOGS = 1000
_IDEMPOTENCY_KEY = re.compile(r"^[a-zA-Z0-9_-]{1,255}$")


def _invalid(path: str, message: str) -> InvalidError:
    problem = FieldProblem(path, message)
    return InvalidError(str(problem), problems=[problem])


def _network(config: NetworkConfig | None, internet: bool | None) -> NetworkPolicy | None:
    if config is None and internet is None:
        return None
    shape = config or NetworkConfig()
    if shape.egress_proxy is not None:
        raise UnsupportedError("egress proxies are not offered", hint="use allowOut and denyOut")
    if shape.rules:
        raise UnsupportedError("header rules are not offered", hint="leave network.rules out")
    return NetworkPolicy(
        allow_internet_access=internet is not False,
        allow_out=shape.allow_out,
        deny_out=shape.deny_out,
        dns_servers=shape.dns_servers,
        allow_public_traffic=shape.allow_public_traffic,
        mask_request_host=shape.mask_request_host,
    )


def new_sandbox(
    wanted: CreateBody, *, default_timeout: int, idempotency_key: str = ""
) -> NewSandbox:
    """Translate a body into what the manager is asked for."""
    timeout = default_timeout if wanted.timeout is None else wanted.timeout
    if timeout <= 0:
        raise _invalid("timeout", "a sandbox needs at least one second")
    auto_resume = bool(wanted.auto_resume and wanted.auto_resume.enabled)
    if auto_resume and not wanted.auto_pause:
        raise _invalid(
            "autoResume", "traffic can only wake what is paused at its end: set autoPause"
        )
    if auto_resume and not wanted.auto_pause_memory:
        raise _invalid("autoResume", "a sandbox paused without memory cannot be woken by traffic")
    if wanted.iam:
        raise UnsupportedError("iam tokens are not offered", hint="leave iam out")
    if wanted.volume_mounts:
        raise UnsupportedError("volumes are not offered yet", hint="leave volumeMounts out")
    request = NewSandbox(
        template=wanted.template_id,
        timeout_seconds=timeout,
        auto_pause=wanted.auto_pause,
        auto_pause_memory=wanted.auto_pause_memory,
        auto_resume=auto_resume,
        metadata=wanted.metadata or {},
        env_vars=wanted.env_vars or {},
        network=_network(wanted.network, wanted.allow_internet_access),
        secure=wanted.secure is not False,
        idempotency_key=idempotency_key,
    )
    return apply_extensions(request)


async def _create(context: Context, request: Request, caller: Caller, default: int) -> Response:
    wanted = await body(request, CreateBody)
    key = request.headers.get("idempotency-key", "")
    if key and not _IDEMPOTENCY_KEY.match(key):
        raise _invalid("Idempotency-Key", "up to 255 letters, digits, dashes or underscores")
    sandbox = await context.manager.create(
        caller, new_sandbox(wanted, default_timeout=default, idempotency_key=key)
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
    policy = _network(config, wanted.allow_internet_access) or NetworkPolicy()
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
    return answer(
        [
            {"sandbox": context.shown.created(result.sandbox)}
            if result.sandbox is not None
            else {"error": _refusal(result.error)}
            for result in results
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
    return answer(convert.snapshot(checkpoint), 201)


async def metrics(context: Context, request: Request, caller: Caller) -> Response:
    """Show what a sandbox used."""
    params = request.query_params
    start = query.unix_seconds(params, "start")
    end = query.unix_seconds(params, "end")
    samples = await context.manager.metrics(
        caller, request.path_params["id"], start_unix=start, end_unix=end
    )
    return answer([convert.metric(item) for item in samples])


async def metrics_of_many(context: Context, request: Request, caller: Caller) -> Response:
    """Show the latest sample of several sandboxes."""
    wanted = [item for item in request.query_params.get("sandbox_ids", "").split(",") if item]
    if not 1 <= len(wanted) <= query.MAX_LIMIT:
        raise _invalid("sandbox_ids", f"1 to {query.MAX_LIMIT} ids, separated by commas")
    found: dict[str, object] = {}
    for sandbox_id in dict.fromkeys(wanted):
        try:
            samples = await context.manager.metrics(caller, sandbox_id)
        except PaddockError:
            # One that is gone or nobody's is left out, as E2B does.
            continue
        if samples:
            found[sandbox_id] = convert.metric(samples[-1])
    return answer({"sandboxes": found})


async def logs_v1(context: Context, request: Request, caller: Caller) -> Response:
    """Show log lines (older form: each line is JSON)."""
    params = request.query_params
    start = query.number(params, "start", default=0, low=0, high=10**14)
    limit = query.number(params, "limit", default=MAX_LOGS, low=1, high=MAX_LOGS)
    entries = await context.manager.logs(
        caller, request.path_params["id"], since_unix_millis=start or None, limit=limit
    )
    return answer(convert.logs_v1(entries))


async def logs_v2(context: Context, request: Request, caller: Caller) -> Response:
    """Show log entries from a moment on, or those before it, the newest first."""
    params = request.query_params
    cursor = query.number(params, "cursor", default=0, low=0, high=10**14)
    limit = query.number(params, "limit", default=MAX_LOGS, low=1, high=MAX_LOGS)
    level = params.get("level") or None
    if level is not None and level not in convert.LEVELS:
        raise _invalid("level", f"{level!r} is none of {', '.join(convert.LEVELS)}")
    direction = params.get("direction") or "forward"
    if direction not in ("forward", "backward"):
        raise _invalid("direction", f"{direction!r} is neither forward nor backward")
    is_back = direction == "backward"
    since = None if is_back else cursor or None
    entries = await context.manager.logs(
        caller, request.path_params["id"], since_unix_millis=since, limit=MAX_LOGS
    )
    if is_back:
        until = cursor / 1000 if cursor else math.inf
        entries = [entry for entry in reversed(entries) if entry.at.timestamp() <= until]
    chosen = convert.logs_v2(entries, level=level, search=params.get("search"))
    return answer({"logs": chosen[:limit]})


ROUTES = (
    route("/v2/sandboxes", "POST", create_v2),
    route("/sandboxes", "POST", create_v1),
    route("/v2/sandboxes", "GET", list_v2),
    route("/sandboxes", "GET", list_v1),
    route("/sandboxes/metrics", "GET", metrics_of_many),
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
    route("/sandboxes/{id}/metrics", "GET", metrics),
    route("/sandboxes/{id}/logs", "GET", logs_v1),
    route("/v2/sandboxes/{id}/logs", "GET", logs_v2),
)
