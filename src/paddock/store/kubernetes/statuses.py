"""What an API server refuses, in our words.

Reads a Kubernetes `Status` from its bytes and gives the matching error of `kit.errors`, with the
field paths the server names. Retries are in `client`.
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

_LONGEST_TEXT = 512
"""Foreign text in our messages is cut here, to protect logs."""
_STRICT = re.compile(r'(unknown|duplicate) field "([^"]+)"')
_QUOTA = re.compile(r"exceeded quota|quota.* exceeded", re.IGNORECASE)
_UNKNOWN_SELECTOR = re.compile(r"field label .*not supported|is not a known field selector")
_PLAIN: dict[int, Callable[[str], PaddockError]] = {
    405: UnsupportedError,
    410: GoneError,
    413: TooLargeError,
    504: DeadlineExceededError,
}
"""Codes that mean one thing and carry no more than a sentence."""


class Cause(Struct, frozen=True, gc=False):
    """One reason among several, usually about one field."""

    reason: str = ""
    message: str = ""
    field: str = ""


class Details(Struct, frozen=True, rename="camel"):
    """Which object, and why in detail."""

    name: str = ""
    kind: str = ""
    uid: str = ""
    causes: tuple[Cause, ...] = ()
    retry_after_seconds: int = 0


class Status(Struct, frozen=True, rename="camel"):
    """An API server's answer that is not an object."""

    kind: str = ""
    status: str = ""
    message: str = ""
    reason: str = ""
    details: Details | None = None
    code: int = 0


_decoder = msgspec.json.Decoder(Status)


def read(code: int, body: bytes | memoryview) -> Status:
    """Read the answer to a failed request; a body that is no Status becomes one."""
    try:
        status = _decoder.decode(body)
    except msgspec.DecodeError:
        status = None
    if status is None or status.kind != "Status":
        text = bytes(body[:_LONGEST_TEXT]).decode(errors="replace").strip()
        return Status(message=text or f"HTTP {code}", code=code)
    if status.code == 0:
        return msgspec.structs.replace(status, code=code)
    return status


def refuses_selector(error: InvalidError) -> bool:
    """Whether the server refused a field selector because it cannot select by that field."""
    return _UNKNOWN_SELECTOR.search(error.message) is not None


def error_from(status: Status, *, retry_after_seconds: float | None = None) -> PaddockError:
    """Return the error that says the same."""
    details = status.details or Details()
    message = status.message[:_LONGEST_TEXT]
    after = retry_after_seconds or float(details.retry_after_seconds) or None
    if (plain := _PLAIN.get(status.code)) is not None:
        return plain(message)
    match status.code:
        case 400 | 406 | 415 | 422:
            problems = _problems(status.message, details)
            return InvalidError(message, problems=problems, hint=_hint(problems))
        case 401:
            return UnauthenticatedError(
                f"the API server does not know our credential: {message}",
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
            return _broken(status.code, message, after)


def _problems(message: str, details: Details) -> list[FieldProblem]:
    """Collect field paths: from causes, or from a strict decoder's sentence."""
    problems = [
        FieldProblem(cause.field, cause.message[:_LONGEST_TEXT])
        for cause in details.causes
        if cause.field
    ]
    return problems or [
        FieldProblem(path, f"{fault} field") for fault, path in _STRICT.findall(message)
    ]


def _hint(problems: list[FieldProblem]) -> str | None:
    if any(problem.message == "unknown field" for problem in problems):
        return "if the field is one of Paddock's, the cluster's CRDs are older than this program"
    return None


def _forbidden(message: str, details: Details) -> PaddockError:
    if _QUOTA.search(message):
        return QuotaExceededError(message)
    if any(cause.reason == "NamespaceTerminating" for cause in details.causes):
        return ConflictError(message)
    return ForbiddenError(message, hint="grant the role's permissions: deploy/ has them")


def _not_found(status: Status, message: str) -> PaddockError:
    if status.kind == "Status" and status.details is not None and status.details.name:
        return NotFoundError(message)
    # A path the server does not serve is answered in plain text, or without naming an object.
    return UnsupportedError(
        f"the API server does not serve this kind: {message}",
        hint="install Paddock's CRDs: `paddock kube install`",
    )


def _broken(code: int, message: str, after: float | None) -> PaddockError:
    if "request is too large" in message:  # etcd's own limit arrives as an internal error
        return TooLargeError(message)
    return UnavailableError(f"the API server answered {code}: {message}", retry_after_seconds=after)
