"""HTTP status codes of errors: one table for every API.

The body depends on the API: `kube.status` returns Kubernetes' `Status`.
"""

from collections.abc import Mapping

from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    DeadlineExceededError,
    DiskFullError,
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
    UnstorableError,
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
    UnstorableError: 409,
    GoneError: 410,
    QuotaExceededError: 429,
    RateLimitedError: 429,
    UnsupportedError: 501,
    UnavailableError: 503,
    DiskFullError: 507,
    DeadlineExceededError: 504,
    PaddockError: 500,
}


def status_of(error: PaddockError) -> int:
    """Return the status of an error: that of its class or of its nearest base class."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def retry_after(error: PaddockError) -> float | None:
    """Return the seconds after which a retry may succeed, or None if unknown."""
    if isinstance(error, (RateLimitedError, UnavailableError)):
        return error.retry_after_seconds
    return None
