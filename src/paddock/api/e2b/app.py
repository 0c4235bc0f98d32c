"""The application that serves E2B's API, also below `/kruise/api`."""

import logging
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from paddock.api.audit.notes import notes_of
from paddock.api.e2b import (
    batch,
    keys,
    metrics_logs,
    openapi,
    sandboxes,
    unsupported,
)
from paddock.api.e2b.context import E2bContext, json_response
from paddock.api.e2b.schemas import ErrorBody
from paddock.api.e2b.templates import routes as templates
from paddock.api.e2b.to_e2b import E2bRenderer
from paddock.api.errors import status_of
from paddock.api.login_limits import LoginLimits
from paddock.api.request_ids import RequestIds
from paddock.kit.errors import (
    PaddockError,
    QuotaExceededError,
    RateLimitedError,
    UnavailableError,
)
from paddock.manager.keys import Keyring
from paddock.manager.service import Manager
from paddock.resources.tokens import TokenSeed

log = logging.getLogger(__name__)


def error_response(request: Request, status: int, message: str, hint: str | None) -> Response:
    """Return an error in the form that E2B's clients parse."""
    text = f"{message} ({hint})" if hint else message
    return json_response(
        ErrorBody(code=status, message=text, request_id=request.state.request_id), status
    )


async def on_error(request: Request, error: Exception) -> Response:
    """Return the response for a `PaddockError`."""
    if not isinstance(error, PaddockError):
        raise TypeError("not a PaddockError") from error
    notes_of(request.scope).fail(error)
    status = 429 if isinstance(error, QuotaExceededError) else status_of(error)
    response = error_response(request, status, error.message, error.hint)
    if isinstance(error, (RateLimitedError, UnavailableError)) and error.retry_after_seconds:
        response.headers["Retry-After"] = str(max(round(error.retry_after_seconds), 1))
        response.headers["Should-Retry"] = "true"
    elif status in (429, 503, 504):
        # Clients would retry on their own, without a chance of success.
        response.headers["Should-Retry"] = "false"
    return response


async def on_internal_error(request: Request, error: Exception) -> Response:
    """Return the response for an unexpected error, and log it."""
    log.error("request failed", exc_info=error)
    return error_response(request, 500, "internal error", f"request {request.state.request_id}")


async def on_not_found(request: Request, _error: Exception) -> Response:
    """Return the response for an unknown path."""
    return error_response(request, 404, f"there is no {request.url.path}", None)


async def on_method_not_allowed(request: Request, _error: Exception) -> Response:
    """Return the response for a method that a path does not have."""
    return error_response(
        request, 405, f"method {request.method} is not allowed for {request.url.path}", None
    )


async def health(_request: Request) -> Response:
    """Return that the process is up."""
    return PlainTextResponse("OK")


def routes() -> Sequence[BaseRoute]:
    """Return every route once; the application serves them below two prefixes."""
    return (
        Route("/health", health),
        Route("/openapi.json", openapi.serve),
        *batch.ROUTES,
        *metrics_logs.ROUTES,
        *sandboxes.ROUTES,
        *unsupported.ROUTES,
        *templates.ROUTES,
        *keys.ROUTES,
    )


def create_app(
    manager: Manager,
    keyring: Keyring,
    seed: TokenSeed,
    *,
    logins: LoginLimits,
    domain: str | None = None,
) -> Starlette:
    """Return the application."""
    served = routes()
    app = Starlette(
        routes=[Mount(openapi.PREFIX, routes=served), *served],
        middleware=[Middleware(RequestIds)],
        exception_handlers={
            PaddockError: on_error,
            404: on_not_found,
            405: on_method_not_allowed,
            Exception: on_internal_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.e2b = E2bContext(manager, keyring, E2bRenderer(seed, domain), logins)
    return app
