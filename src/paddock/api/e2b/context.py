"""Shared by all handlers of E2B's API: authentication, bodies, responses."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paddock.api import bodies
from paddock.api.audit.e2b_calls import CALLS
from paddock.api.audit.notes import CALLER, notes_of
from paddock.api.e2b.to_e2b import E2bRenderer
from paddock.api.login_limits import LoginLimits, limited_address
from paddock.claims.caller import Caller
from paddock.kit.errors import InvalidError
from paddock.manager.keys import Keyring
from paddock.manager.service import Manager

MAX_BODY_BYTES = 1 << 20
B = TypeVar("B")
_json = msgspec.json.Encoder()


class E2bContext:
    """Dependencies of the handlers."""

    def __init__(
        self, manager: Manager, keyring: Keyring, renderer: E2bRenderer, logins: LoginLimits
    ) -> None:
        self.manager = manager
        self.keyring = keyring
        self.renderer = renderer
        self.logins = logins

    def caller(self, request: Request) -> Caller:
        """Return the authenticated caller; another control plane may have authenticated it
        already."""
        known: Caller | None = request.scope.get(CALLER)
        if known is not None:
            return known
        return authenticate(request, self.keyring, self.logins)


def authenticate(request: Request, keyring: Keyring, logins: LoginLimits) -> Caller:
    """Return the caller whose API key the request carries; wrong keys are slowed down, and calls
    are counted."""
    key = request.headers.get("x-api-key")
    if not key:
        return keyring.authenticate(None)
    caller = logins.check(request, key, lambda: keyring.authenticate(key))
    request.scope[CALLER] = caller
    logins.calls.take(limited_address(request), caller.key_id)
    return caller


ROUTE_ACCESS: dict[tuple[str, str], "RouteAccess | None"] = {}
"""The right of every route, by method and path."""
Handler = Callable[[E2bContext, Request, Caller], Awaitable[Response]]


class RouteAccess(Struct, frozen=True):
    """The right that a route needs; the use case decides about the object."""

    verb: str
    resource: str


UNSUPPORTED = None
"""The right of a route that refuses every caller."""


def route(path: str, method: str, handler: Handler, access: RouteAccess | None) -> Route:
    """Return a route whose handler gets the authenticated caller."""

    call = CALLS.get((method, path))

    async def endpoint(request: Request) -> Response:
        notes_of(request.scope).call = call
        context: E2bContext = request.app.state.e2b
        caller = context.caller(request)
        if access is not None:
            caller.require(access.verb, access.resource)
        if (sandbox_id := request.path_params.get("id")) is not None:
            # A shard of a batch becomes a regular sandbox on its first use.
            await context.manager.batches.materialize_claim(sandbox_id.partition("-")[0], caller)
        return await handler(context, request, caller)

    ROUTE_ACCESS[(method, path)] = access
    endpoint.__name__ = handler.__name__
    endpoint.__doc__ = handler.__doc__
    return Route(path, endpoint, methods=[method])


async def read_body(request: Request, kind: type[B], *, default: B | None = None) -> B:
    """Parse the body; raises `InvalidError` with the field's path if it is invalid."""
    data = await bodies.read_limited(request, MAX_BODY_BYTES)
    if not data and default is not None:
        return default
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise InvalidError("the body is not UTF-8") from error
    except RecursionError as error:
        raise InvalidError("the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        message, _, where = str(error).partition(" - at `")
        path = where.rstrip("`").removeprefix("$").removeprefix(".")
        raise InvalidError.at(path, message) from error


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(_json.encode(content), status, headers, media_type="application/json")


def no_content() -> Response:
    """Return a 204 response."""
    return Response(status_code=204)
