"""Conversion of error responses of the API server to errors.

Decodes a Kubernetes `Status` and returns the matching error of `kit.errors`, with the field paths
that the server reports. Retries are in `client`.
"""

import re
from collections.abc import Callable

import msgspec
from msgspec import Struct

from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    DeadlineExceededError,
    FieldProblem,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    PaddockError,
    QuotaExceededError,
    RateLimitedError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

_MAX_TEXT = 512
"""Characters of server messages that are kept, to protect logs."""
_STRICT = re.compile(r'(unknown|duplicate) field "([^"]+)"')
_QUOTA = re.compile(r"exceeded quota|quota.* exceeded", re.IGNORECASE)
_UNKNOWN_SELECTOR = re.compile(r"field label .*not supported|is not a known field selector")
_PLAIN: dict[int, Callable[[str], PaddockError]] = {
    405: UnsupportedError,
    410: GoneError,
    413: TooLargeError,
    504: DeadlineExceededError,
}
"""Codes with one meaning, whose response holds only a message."""


class Cause(Struct, frozen=True, gc=False):
    """One cause of an error, usually about one field."""

    reason: str = ""
    message: str = ""
    field: str = ""


class Details(Struct, frozen=True, rename="camel"):
    """The object and the causes of an error."""

    name: str = ""
    kind: str = ""
    uid: str = ""
    causes: tuple[Cause, ...] = ()
    retry_after_seconds: int = 0


class Status(Struct, frozen=True, rename="camel"):
    """A Kubernetes `Status`: a response that is not an object."""

    kind: str = ""
    status: str = ""
    message: str = ""
    reason: str = ""
    details: Details | None = None
    code: int = 0


_decoder = msgspec.json.Decoder(Status)


def read(code: int, body: bytes | memoryview) -> Status:
    """Decode an error response; a body that is not a Status becomes the message of one."""
    try:
        status = _decoder.decode(body)
    except msgspec.DecodeError:
        status = None
    if status is None or status.kind != "Status":
        text = bytes(body[:_MAX_TEXT]).decode(errors="replace").strip()
        return Status(message=text or f"HTTP {code}", code=code)
    if status.code == 0:
        return msgspec.structs.replace(status, code=code)
    return status


def rejects_selector(error: InvalidError) -> bool:
    """Whether the server rejected a field selector because it does not support the field."""
    return _UNKNOWN_SELECTOR.search(error.message) is not None


def error_from(status: Status, *, retry_after_seconds: float | None = None) -> PaddockError:
    """Return the matching error of `kit.errors`."""
    details = status.details or Details()
    message = status.message[:_MAX_TEXT]
    after = retry_after_seconds or float(details.retry_after_seconds) or None
    if (plain := _PLAIN.get(status.code)) is not None:
        return plain(message)
    match status.code:
        case 400 | 406 | 415 | 422:
            problems = _problems(status.message, details)
            return InvalidError(message, problems=problems, hint=_hint(problems))
        case 401:
            return UnauthenticatedError(
                f"the API server rejected the credential: {message}",
                hint="renew the token or certificate in the kubeconfig",
            )
        case 403:
            return _forbidden(message, details)
        case 404:
            return _not_found(status, message)
        case 409:
            taken = status.reason == "AlreadyExists"
            return AlreadyExistsError(message) if taken else ConflictError(message)
        case 429:
            return RateLimitedError(message, retry_after_seconds=after or 1.0)
        case _:
            return _server_error(status.code, message, after)


def _problems(message: str, details: Details) -> list[FieldProblem]:
    """Return field paths from the causes, or from the message of strict field validation."""
    problems = [
        FieldProblem(cause.field, cause.message[:_MAX_TEXT])
        for cause in details.causes
        if cause.field
    ]
    return problems or [
        FieldProblem(path, f"{fault} field") for fault, path in _STRICT.findall(message)
    ]


def _hint(problems: list[FieldProblem]) -> str | None:
    if any(problem.message == "unknown field" for problem in problems):
        return "if it is a field of Paddock, the CRDs are outdated: `paddock kube install`"
    return None


def _forbidden(message: str, details: Details) -> PaddockError:
    if _QUOTA.search(message):
        return QuotaExceededError(message)
    if any(cause.reason == "NamespaceTerminating" for cause in details.causes):
        return ConflictError(message)
    return ForbiddenError(
        message, hint="grant the permissions of the role; the manifests are in deploy/"
    )


def _not_found(status: Status, message: str) -> PaddockError:
    if status.kind == "Status" and status.details is not None and status.details.name:
        return NotFoundError(message)
    # For an unknown path, servers respond with plain text or without an object name.
    return UnsupportedError(
        f"the API server does not serve this kind: {message}",
        hint="install Paddock's CRDs: `paddock kube install`",
    )


def _server_error(code: int, message: str, after: float | None) -> PaddockError:
    if "request is too large" in message:  # the limit of etcd is reported as an internal error
        return TooLargeError(message)
    return UnavailableError(f"the API server returned {code}: {message}", retry_after_seconds=after)
