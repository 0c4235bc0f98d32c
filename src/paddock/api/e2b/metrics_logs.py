"""Routes for metrics and logs of sandboxes."""

import math

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.e2b import query, to_e2b
from paddock.api.e2b.context import E2bContext, RouteAccess, json_response, route
from paddock.claims.caller import Caller
from paddock.kit.errors import InvalidError, PaddockError

MAX_LOGS = 1000
KEPT_LOGS = 20_000
"""More than any runtime keeps, so that filters apply to all entries before the limit does."""


async def metrics(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return a sandbox's metrics."""
    params = request.query_params
    start = query.unix_seconds(params, "start")
    end = query.unix_seconds(params, "end")
    samples = await context.manager.queries.metrics(
        caller, request.path_params["id"], start_unix=start, end_unix=end
    )
    return json_response([to_e2b.metric(item) for item in samples])


async def metrics_of_many(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return the latest sample of several sandboxes."""
    wanted = [item for item in request.query_params.get("sandbox_ids", "").split(",") if item]
    if not 1 <= len(wanted) <= query.MAX_LIMIT:
        raise InvalidError.at("sandbox_ids", f"1 to {query.MAX_LIMIT} ids, separated by commas")
    found: dict[str, object] = {}
    for sandbox_id in dict.fromkeys(wanted):
        try:
            samples = await context.manager.queries.metrics(caller, sandbox_id)
        except PaddockError:
            # Sandboxes that are gone or not the caller's are left out, as E2B does.
            continue
        if samples:
            found[sandbox_id] = to_e2b.metric(samples[-1])
    return json_response({"sandboxes": found})


async def logs_v1(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return log lines (older form: each line is JSON)."""
    params = request.query_params
    start = query.number(params, "start", default=0, low=0, high=10**14)
    limit = query.number(params, "limit", default=MAX_LOGS, low=1, high=MAX_LOGS)
    entries = await context.manager.queries.logs(
        caller, request.path_params["id"], since_unix_millis=start or None, limit=limit
    )
    return json_response(to_e2b.logs_v1(entries))


async def logs_v2(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Return log entries after a time, or those before it, newest first."""
    params = request.query_params
    cursor = query.number(params, "cursor", default=0, low=0, high=10**14)
    limit = query.number(params, "limit", default=MAX_LOGS, low=1, high=MAX_LOGS)
    level = params.get("level") or None
    if level is not None and level not in to_e2b.LEVELS:
        raise InvalidError.at("level", f"{level!r} is none of {', '.join(to_e2b.LEVELS)}")
    direction = params.get("direction") or "forward"
    if direction not in ("forward", "backward"):
        raise InvalidError.at("direction", f"{direction!r} is neither forward nor backward")
    is_back = direction == "backward"
    since = None if is_back else cursor or None
    entries = await context.manager.queries.logs(
        caller, request.path_params["id"], since_unix_millis=since, limit=KEPT_LOGS
    )
    if is_back:
        until = cursor / 1000 if cursor else math.inf
        entries = [entry for entry in reversed(entries) if entry.at.timestamp() <= until]
    chosen = to_e2b.logs_v2(entries, level=level, search=params.get("search"))
    return json_response({"logs": chosen[:limit]})


ROUTES = (
    route("/sandboxes/metrics", "GET", metrics_of_many, RouteAccess("get", "sandboxes/metrics")),
    route("/sandboxes/{id}/metrics", "GET", metrics, RouteAccess("get", "sandboxes/metrics")),
    route("/sandboxes/{id}/logs", "GET", logs_v1, RouteAccess("get", "sandboxes/logs")),
    route("/v2/sandboxes/{id}/logs", "GET", logs_v2, RouteAccess("get", "sandboxes/logs")),
)
