"""Shared by all handlers of E2B's API: authentication, bodies, responses, the call log."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paddock.api import bodies
from paddock.api.e2b.to_e2b import E2bRenderer
from paddock.api.login_limits import LoginLimits
from paddock.claims.caller import Caller
from paddock.kit.errors import InvalidError, PaddockError
from paddock.kit.logs import fields
from paddock.manager.keys import Keyring
from paddock.manager.service import Manager

calls = logging.getLogger("paddock.api.calls")
"""The audit log: which key changed what."""
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
        known: Caller | None = request.scope.get("paddock.caller")
        if known is not None:
            return known
        return authenticate(request, self.keyring, self.logins)


def authenticate(request: Request, keyring: Keyring, logins: LoginLimits) -> Caller:
    """Return the caller whose API key the request carries; wrong keys are slowed down."""
    key = request.headers.get("x-api-key")
    if not key:
        return keyring.authenticate(None)
    return logins.check(request, key, lambda: keyring.authenticate(key))


Handler = Callable[[E2bContext, Request, Caller], Awaitable[Response]]


@contextlib.contextmanager
def log_call(request: Request, caller: Caller) -> Generator[None]:
    """Log a call that may change something: caller, path, result, created ids.

    Handlers put created ids in `request.state.made`, and a result other than success, if they do
    not raise, in `request.state.result`.
    """
    if request.method in ("GET", "HEAD"):
        yield
        return
    result = "broken off"
    try:
        yield
        result = getattr(request.state, "result", "done")
    except PaddockError as error:
        result = error.reason
        raise
    finally:
        # Every value is quoted or checked, so that callers cannot forge log lines.
        facts = fields(
            method=request.method,
            path=quote(request.scope["path"], errors="replace"),
            team=caller.team,
            key=caller.key_id,
            request=getattr(request.state, "request_id", "-"),
            result=result,
            made=getattr(request.state, "made", "") or "-",
        )
        calls.info("called", extra=facts)


def route(path: str, method: str, handler: Handler) -> Route:
    """Return a route whose handler gets the authenticated caller."""

    async def endpoint(request: Request) -> Response:
        context: E2bContext = request.app.state.e2b
        caller = context.caller(request)
        if (sandbox_id := request.path_params.get("id")) is not None:
            # A shard of a batch becomes a regular sandbox on its first use.
            await context.manager.batches.materialize_claim(sandbox_id.partition("-")[0], caller)
        with log_call(request, caller):
            return await handler(context, request, caller)

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
