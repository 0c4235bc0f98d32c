"""The control plane's API for gateways. Bearer token; never reachable from a sandbox."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paddock.api.audit.notes import notes_of
from paddock.api.errors import retry_after, status_of
from paddock.kit import bearer
from paddock.kit.errors import NotFoundError, PaddockError, UnauthenticatedError
from paddock.manager.federation.protocol import GATEWAY
from paddock.manager.service import Manager
from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox

PREFIX = "/_paddock"


class GatewayReport(Struct, frozen=True):
    """`POST /_paddock/activity`: a gateway reports its address and recent traffic."""

    url: str
    """The address that routes are sent to."""
    seen: Mapping[str, float] = {}
    """Seconds since each sandbox was active, by uid."""


OnReport = Callable[[GatewayReport], Awaitable[tuple[str, ...]]]
"""Handles a report and returns the addresses of all gateways."""


FindRemote = Callable[[str], Awaitable[tuple[Sandbox, str]]]
"""Finds a sandbox of another cluster and that cluster's gateway; raises `NotFoundError`."""


class WakeBody(Struct, frozen=True):
    """`POST /_paddock/wake`."""

    id: str
    uid: str


class ErrorPayload(Struct, frozen=True):
    """An error sent to another Paddock process, with the name of its class."""

    kind: str
    message: str
    retry_after_seconds: float | None = None


def create_app(
    manager: Manager, token: str, on_report: OnReport, find_remote: FindRemote | None = None
) -> Starlette:
    """Return the application."""

    def authorize(request: Request) -> None:
        if not bearer.is_authorized(request.headers.get("authorization", ""), token):
            raise UnauthenticatedError(
                "this path is for gateways: the bearer token is missing or wrong"
            )

    async def wake(request: Request) -> Response:
        authorize(request)
        wanted = msgspec.json.decode(await request.body(), type=WakeBody)
        sandbox = manager.queries.find_by_id(wanted.id)
        if sandbox is None or sandbox.metadata.uid != wanted.uid:
            raise NotFoundError("the sandbox was not found")
        return Response(
            codec.encode(await manager.lifecycle.wake(sandbox)), media_type="application/json"
        )

    async def lookup(request: Request) -> Response:
        authorize(request)
        sandbox = manager.queries.find_by_id(request.path_params["id"])
        if sandbox is None:
            sandbox = await manager.batches.materialize_claim(request.path_params["id"])
        if sandbox is not None:
            return Response(codec.encode(sandbox), media_type="application/json")
        if find_remote is None:
            raise NotFoundError("the sandbox was not found")
        sandbox, gateway = await find_remote(request.path_params["id"])
        return Response(
            codec.encode(sandbox), headers={GATEWAY: gateway}, media_type="application/json"
        )

    async def activity(request: Request) -> Response:
        authorize(request)
        report = msgspec.json.decode(await request.body(), type=GatewayReport)
        known = await on_report(report)
        return Response(msgspec.json.encode(known), media_type="application/json")

    return Starlette(
        routes=[
            Route(f"{PREFIX}/wake", wake, methods=["POST"]),
            Route(f"{PREFIX}/sandboxes/{{id}}", lookup, methods=["GET"]),
            Route(f"{PREFIX}/activity", activity, methods=["POST"]),
        ],
        exception_handlers=ERROR_HANDLERS,
    )


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, PaddockError):
        raise TypeError("not a PaddockError") from error
    notes_of(request.scope).fail(error)
    problem = ErrorPayload(type(error).__name__, error.message, retry_after(error))
    return Response(msgspec.json.encode(problem), status_of(error), media_type="application/json")


async def _on_garbage(_request: Request, error: Exception) -> Response:
    problem = ErrorPayload("InvalidError", f"the body cannot be read: {error}")
    return Response(msgspec.json.encode(problem), 400, media_type="application/json")


ERROR_HANDLERS = {
    PaddockError: _on_error,
    msgspec.DecodeError: _on_garbage,
    RecursionError: _on_garbage,
}
"""Turns errors into `ErrorPayload`s, which other Paddock processes raise again."""
