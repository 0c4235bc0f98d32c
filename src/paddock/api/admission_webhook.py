"""The validating admission webhook: rejects invalid objects that a schema cannot detect.

Answers `AdmissionReview`s for Paddock's kinds with the result of `resources.schema.validation` and
of further checks passed in by `paddock.app` (for example, specs that no pod can have). It changes
and stores nothing. TLS is set up by `app.wiring.tls.webhook`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paddock.api import bodies
from paddock.kit.errors import PaddockError, TooLargeError
from paddock.kit.logs import fields
from paddock.resources import codec
from paddock.resources.meta import Resource
from paddock.resources.registry import BY_KIND
from paddock.resources.schema import validation

log = logging.getLogger(__name__)

PATH = "/validate"
MAX_BODY_BYTES = 8 << 20
"""Room for the old and the new version of the largest object that an API server accepts."""
_API_VERSION = "admission.k8s.io/v1"

Check = Callable[[Resource | None, Resource], Sequence[str]]
"""Validates a change from old to new: raises a `PaddockError`, or returns warnings."""


class _Kind(Struct, frozen=True):
    kind: str = ""


class _Request(Struct, frozen=True, rename="camel"):
    uid: str
    kind: _Kind = _Kind()
    operation: str = ""
    object: Any = None
    old_object: Any = None


class _Review(Struct, frozen=True, rename="camel"):
    request: _Request | None = None


def create_app(checks: Sequence[Check] = ()) -> Starlette:
    """Return the application."""

    async def validate(request: Request) -> Response:
        try:
            body = await bodies.read_limited(request, MAX_BODY_BYTES)
            review = msgspec.json.decode(body, type=_Review)
        except (msgspec.DecodeError, RecursionError, TooLargeError) as error:
            return Response(
                f"the body is not an AdmissionReview: {error}", 400, media_type="text/plain"
            )
        if review.request is None:
            return Response("the AdmissionReview has no request", 400, media_type="text/plain")
        response = {
            "apiVersion": _API_VERSION,
            "kind": "AdmissionReview",
            "response": review_of(review.request, checks),
        }
        return Response(msgspec.json.encode(response), media_type="application/json")

    return Starlette(routes=[Route(PATH, validate, methods=["POST"])])


def review_of(request: _Request, checks: Sequence[Check]) -> dict[str, Any]:
    """Return the response: whether the change is allowed, and if not, why."""
    try:
        warnings = _validate(request, checks)
    except PaddockError as error:
        log.info(
            "change refused",
            extra=fields(kind=request.kind.kind, operation=request.operation, why=error.message),
        )
        text = error.message + (f" ({error.hint})" if error.hint else "")
        status = {"code": 422, "reason": "Invalid", "message": text}
        return {"uid": request.uid, "allowed": False, "status": status}
    response: dict[str, Any] = {"uid": request.uid, "allowed": True}
    return {**response, "warnings": warnings} if warnings else response


def _validate(request: _Request, checks: Sequence[Check]) -> list[str]:
    info = BY_KIND.get(request.kind.kind)
    if info is None or request.operation not in ("CREATE", "UPDATE"):
        return []
    new = _read(info.cls, request.object)
    old = _read(info.cls, request.old_object) if request.operation == "UPDATE" else None
    if old is None:
        validation.validate_create(new)
    else:
        validation.validate_update(old, new)
    # An object being deleted must not be blocked by further checks.
    if new.is_deleting:
        return []
    return [warning for check in checks for warning in check(old, new)]


def _read(cls: type[Resource], plain: Any) -> Resource:
    return codec.from_builtins(cls, codec.without_nulls(cls, plain))
