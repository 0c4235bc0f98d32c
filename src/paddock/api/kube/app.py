"""The declarative API as one ASGI application.

    app = create_app(store, KubeApiSettings(tokens=(token,)))

Every error is returned as Kubernetes' `Status`. The store deletes the contents of deleted
namespaces.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paddock.api.admission_webhook import Check
from paddock.api.audit.notes import CALLER, notes_of
from paddock.api.kube import discovery, routes
from paddock.api.kube.auth import FindKey, authenticate
from paddock.api.kube.context import KubeContext, json_response
from paddock.api.kube.key_writes.writer import KeyWrites
from paddock.api.kube.openapi import documents
from paddock.api.kube.requests import parse_accept
from paddock.api.kube.scheme import ResourceTarget
from paddock.api.kube.settings import KubeApiSettings
from paddock.api.kube.status import NotAllowedError, code_of, failure_status, headers_of
from paddock.api.kube.verbs import reviews
from paddock.api.login_limits import LoginLimits
from paddock.api.request_ids import RequestIds
from paddock.claims.caller import Caller
from paddock.kit.clock import Clock, system
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.store.port import Store

log = logging.getLogger(__name__)

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_AGGREGATED = "APIGroupDiscoveryList"


def create_app(
    store: Store,
    settings: KubeApiSettings,
    *,
    clock: Clock | None = None,
    checks: Sequence[Check] = (),
    logins: LoginLimits | None = None,
    find_key: FindKey | None = None,
    key_writes: KeyWrites | None = None,
) -> Starlette:
    """Return the application.

    Without `find_key`, API keys are not accepted; without `key_writes`, they only read and delete.
    """
    clock = clock or system()
    context = KubeContext(store, settings, clock, tuple(checks), key_writes)
    app = Starlette(
        routes=[
            Route("/version", _version),
            Route("/api", _core),
            Route("/apis", _groups),
            Route("/api/{version}", _core_resources),
            Route("/apis/{group}", _group),
            Route("/apis/{group}/{version}", _group_resources),
            Route("/openapi/v2", documents.serve_v2),
            Route("/openapi/v3", documents.serve_index),
            Route("/openapi/v3/{path:path}", documents.serve_v3),
            *(
                Route(path, _with_context(reviews.serve, context), methods=["POST"])
                for path in reviews.PATHS
            ),
            Route("/api/{rest:path}", _with_context(routes.serve, context), methods=_METHODS),
            Route("/apis/{rest:path}", _with_context(routes.serve, context), methods=_METHODS),
            *(Route(path, _health) for path in ("/healthz", "/livez", "/readyz")),
        ],
        exception_handlers={
            PaddockError: _on_paddock_error,
            HTTPException: _on_http_exception,
            Exception: _on_internal_error,
        },
    )
    logins = logins or LoginLimits(clock)
    app.add_middleware(
        _AuthMiddleware,
        login=lambda request: authenticate(request, settings, logins, find_key),
    )
    app.add_middleware(RequestIds, header=b"audit-id")
    return app


class _AuthMiddleware:
    """Authenticates every request."""

    def __init__(self, app: ASGIApp, login: Callable[[Request], Caller]) -> None:
        self._app = app
        self._login = login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope, receive)
            try:
                scope[CALLER] = self._login(request)
            except PaddockError as error:
                await _error_response(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _with_context(
    handler: Callable[[KubeContext, Request], Awaitable[Response]], context: KubeContext
) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return await handler(context, request)

    return serve


# ---- discovery -----------------------------------------------------------------------------


async def _version(_: Request) -> Response:
    return json_response(discovery.version())


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


async def _core(request: Request) -> Response:
    server = request.headers.get("host", "")
    return _aggregated(request, is_core=True) or json_response(discovery.core_versions(server))


async def _groups(request: Request) -> Response:
    return _aggregated(request, is_core=False) or json_response(discovery.groups())


def _aggregated(request: Request, *, is_core: bool) -> Response | None:
    for option in parse_accept(request.headers.get("accept", "")) or ():
        if option.form == _AGGREGATED and option.version in ("v2", "v2beta1"):
            kind = f"application/json;g=apidiscovery.k8s.io;v={option.version};as={_AGGREGATED}"
            document = discovery.aggregated(option.version, is_core=is_core)
            return json_response(document, media_type=kind)
        if not option.form:
            return None
    return None


async def _core_resources(request: Request) -> Response:
    return _document_or_404(request, discovery.resources("", request.path_params["version"]))


async def _group(request: Request) -> Response:
    return _document_or_404(request, discovery.group(request.path_params["group"]))


async def _group_resources(request: Request) -> Response:
    parameters = request.path_params
    return _document_or_404(
        request, discovery.resources(parameters["group"], parameters["version"])
    )


def _document_or_404(request: Request, document: object | None) -> Response:
    if document is None:
        raise NotFoundError(f"there is no resource at {request.url.path[:200]}")
    return json_response(document)


# ---- errors --------------------------------------------------------------------------------


def _error_response(request: Request, error: PaddockError) -> Response:
    notes_of(request.scope).fail(error)
    target: ResourceTarget | None = getattr(request.state, "target", None)
    info = target.info if target else None
    name = (target.name if target else None) or getattr(request.state, "name", None)
    return json_response(
        failure_status(error, info, name), code_of(error), headers=headers_of(error)
    )


async def _on_paddock_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, PaddockError):
        raise error
    return _error_response(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    path = request.url.path[:200]
    code = error.status_code if isinstance(error, HTTPException) else 500
    if code == 405:
        return _error_response(
            request, NotAllowedError(f"{request.method} is not allowed at {path}")
        )
    return _error_response(request, NotFoundError(f"there is no resource at {path}"))


async def _on_internal_error(request: Request, error: Exception) -> Response:
    log.error("request failed unexpectedly", exc_info=error)
    return _error_response(
        request, PaddockError("internal error; see the log of the control plane")
    )
