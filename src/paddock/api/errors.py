"""Which HTTP status each error becomes: the one table that every API of Paddock reads.

The shape of the body is each protocol's own: `kube.status` writes Kubernetes' `Status`.
"""

from collections.abc import Mapping

from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    DeadlineExceededError,
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

STATUS: Mapping[type[PaddockError], int] = {
    InvalidError: 400,
    TooLargeError: 413,
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    NotFoundError: 404,
    AlreadyExistsError: 409,
    ConflictError: 409,
    GoneError: 410,
    QuotaExceededError: 429,
    RateLimitedError: 429,
    UnsupportedError: 501,
    UnavailableError: 503,
    DeadlineExceededError: 504,
    PaddockError: 500,
}


def status_of(error: PaddockError) -> int:
    """Give the status of an error: its own, or that of the nearest class above it."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def retry_after(error: PaddockError) -> float | None:
    """Give the seconds after which the same call may succeed, where the error knows."""
    if isinstance(error, (RateLimitedError, UnavailableError)):
        return error.retry_after_seconds
    return None
