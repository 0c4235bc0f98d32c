"""Errors that another process of ours reported as `api.internal.ErrorPayload`, as exceptions."""

import msgspec

from paddock.api.internal import ErrorPayload
from paddock.kit import errors
from paddock.kit.errors import PaddockError, RateLimitedError, UnavailableError


def error_from(data: bytes, sender: str) -> PaddockError:
    """Return the error in the body of a response; `UnavailableError` if there is none."""
    try:
        problem = msgspec.json.decode(data, type=ErrorPayload)
    except msgspec.DecodeError:
        return UnavailableError(f"{sender} sent a response that cannot be decoded")
    kind = getattr(errors, problem.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, PaddockError)):
        return UnavailableError(problem.message)
    if issubclass(kind, RateLimitedError):
        return kind(problem.message, retry_after_seconds=problem.retry_after_seconds or 1.0)
    return kind(problem.message)
