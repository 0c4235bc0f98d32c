"""What every handler of E2B's API shares: who calls, what body came, how answers look."""

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
from paddock.claims.caller import Caller
from paddock.kit.errors import InvalidError, PaddockError
from paddock.kit.logs import fields
from paddock.manager.keys import Keyring
from paddock.manager.service import Manager

calls = logging.getLogger("paddock.api.calls")
"""Who changed what, for those who must answer for it."""
MAX_BODY_BYTES = 1 << 20
B = TypeVar("B")
_json = msgspec.json.Encoder()


class E2bContext:
    """What handlers work with."""

    def __init__(self, manager: Manager, keyring: Keyring, renderer: E2bRenderer) -> None:
        self.manager = manager
        self.keyring = keyring
        self.renderer = renderer

    def caller(self, request: Request) -> Caller:
        """Say who calls; another control plane may have found that out already."""
        known: Caller | None = request.scope.get("paddock.caller")
        if known is not None:
            return known
        return self.keyring.authenticate(request.headers.get("x-api-key"))


Handler = Callable[[E2bContext, Request, Caller], Awaitable[Response]]


@contextlib.contextmanager
def log_call(request: Request, caller: Caller) -> Generator[None]:
    """Log a call that may change something: who, what, how it ended, what it made.

    What was made is in `request.state.made`; who ends a call without raising says how in
    `request.state.result`.
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
        # Nothing in this line is as a caller wrote it: nobody can write another's line.
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
    """Make a route whose handler is told who calls; without a known key it is not reached."""

    async def endpoint(request: Request) -> Response:
        context: E2bContext = request.app.state.e2b
        caller = context.caller(request)
        if (sandbox_id := request.path_params.get("id")) is not None:
            # A shard of a batch becomes a sandbox like any other when it is first asked for.
            await context.manager.batches.materialize_claim(sandbox_id.partition("-")[0], caller)
        with log_call(request, caller):
            return await handler(context, request, caller)

    endpoint.__name__ = handler.__name__
    endpoint.__doc__ = handler.__doc__
    return Route(path, endpoint, methods=[method])


async def read_body(request: Request, kind: type[B], *, default: B | None = None) -> B:
    """Read a body; a bad one is an `InvalidError` with the field's path."""
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
    """Answer with JSON."""
    return Response(_json.encode(content), status, headers, media_type="application/json")


def no_content() -> Response:
    """Answer that it is done, with nothing to say."""
    return Response(status_code=204)
