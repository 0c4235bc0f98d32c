"""Errors as Kubernetes' `Status` objects, with the path of every invalid field."""

import math
from typing import Any

from paddock.api.errors import retry_after, status_of
from paddock.api.kube.body.apply import ApplyConflictError
from paddock.kit.errors import (
    AlreadyExistsError,
    FieldProblem,
    InvalidError,
    NotFoundError,
    PaddockError,
    QuotaExceededError,
    TooLargeError,
)
from paddock.resources.registry import KindInfo


class BadRequestError(InvalidError):
    """The request cannot be parsed."""

    reason = "BadRequest"


class NotAllowedError(PaddockError):
    """The resource does not support this verb."""

    reason = "MethodNotAllowed"


class NotAcceptableError(PaddockError):
    """No format in the Accept header is supported."""

    reason = "NotAcceptable"


class UnsupportedMediaTypeError(PaddockError):
    """The format of the body is not supported."""

    reason = "UnsupportedMediaType"


_CODES: dict[type[PaddockError], int] = {
    NotAllowedError: 405,
    NotAcceptableError: 406,
    UnsupportedMediaTypeError: 415,
}


def code_of(error: PaddockError) -> int:
    """Return the status code; a well-formed but invalid object is 422."""
    if type(error) in _CODES:
        return _CODES[type(error)]
    if isinstance(error, InvalidError) and not isinstance(error, (BadRequestError, TooLargeError)):
        return 422
    return status_of(error)


def failure_status(
    error: PaddockError, info: KindInfo | None = None, name: str | None = None
) -> dict[str, Any]:
    """Return the `Status` of an error."""
    code = code_of(error)
    details: dict[str, Any] = {}
    if name:
        details["name"] = name
    if info is not None:
        group = info.cls.API_VERSION.rpartition("/")[0]
        # kubectl prints the kind for invalid objects, and the resource otherwise.
        details["kind"] = info.kind if code == 422 else info.cls.PLURAL
        if group:
            details["group"] = group
    if causes := _causes(error):
        details["causes"] = causes
    if (seconds := retry_after(error)) is not None:
        details["retryAfterSeconds"] = math.ceil(seconds)
    status: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": _message(error, info, name),
        "reason": _reason(error),
        "code": code,
    }
    if details:
        status["details"] = details
    return status


def success_status(info: KindInfo, name: str, uid: str) -> dict[str, Any]:
    """Return the `Status` of a completed deletion."""
    group = info.cls.API_VERSION.rpartition("/")[0]
    details = {"name": name, "group": group, "kind": info.cls.PLURAL, "uid": uid}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {key: value for key, value in details.items() if value},
    }


def headers_of(error: PaddockError) -> dict[str, str]:
    """Return the headers of an error response."""
    found: dict[str, str] = {}
    if (seconds := retry_after(error)) is not None:
        found["Retry-After"] = str(math.ceil(seconds))
    if code_of(error) == 401:
        found["WWW-Authenticate"] = 'Bearer realm="paddock"'
    return found


def _reason(error: PaddockError) -> str:
    # Clients do not know our reason; this one they treat as a limit.
    return "TooManyRequests" if isinstance(error, QuotaExceededError) else error.reason


def _message(error: PaddockError, info: KindInfo | None, name: str | None) -> str:
    # Clients and scripts match these exact messages.
    if info is not None and name:
        is_missing = error.message.startswith(f"there is no {info.kind} ")
        if isinstance(error, NotFoundError) and is_missing:
            return f'{_resource(info)} "{name}" not found'
        if isinstance(error, AlreadyExistsError):
            return f'{_resource(info)} "{name}" already exists'
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _resource(info: KindInfo) -> str:
    group = info.cls.API_VERSION.rpartition("/")[0]
    return f"{info.cls.PLURAL}.{group}" if group else info.cls.PLURAL


def _causes(error: PaddockError) -> list[dict[str, str]]:
    if isinstance(error, ApplyConflictError):
        return [_cause(problem, "FieldManagerConflict") for problem in error.problems]
    if isinstance(error, InvalidError):
        return [_cause(problem, "FieldValueInvalid") for problem in error.problems]
    return []


def _cause(problem: FieldProblem, reason: str) -> dict[str, str]:
    cause = {"reason": reason, "message": problem.message}
    return cause | {"field": problem.path} if problem.path else cause
