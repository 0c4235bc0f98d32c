"""The one tree of errors that cross layers.

    PaddockError
    ├── InvalidError            what was asked is malformed; carries field paths
    │   └── TooLargeError       … because it is too big
    ├── UnauthenticatedError    we do not know who asks
    ├── ForbiddenError          we know, and they may not
    ├── NotFoundError           it is not there, or not theirs to see
    ├── AlreadyExistsError      the name is taken
    ├── ConflictError           somebody wrote first, or the state does not allow it
    ├── GoneError               the version asked for is no longer kept: list anew
    ├── QuotaExceededError      a limit that only an operator can raise
    ├── RateLimitedError        try again later; carries when
    ├── UnsupportedError        this machine or driver cannot do that
    ├── UnavailableError        cannot be done now; carries when to try again
    └── DeadlineExceededError   it took longer than the caller allowed

Below the HTTP edge there are no status codes; `paddock.api` maps these once.
"""

from collections.abc import Sequence
from typing import Self

import msgspec


class PaddockError(Exception):
    """Base of every error Paddock raises on purpose."""

    reason = "InternalError"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        """One action that helps, for people."""


class FieldProblem(msgspec.Struct, frozen=True):
    """One thing wrong with one field."""

    path: str
    """Dotted, from the object's root: `spec.capacity.bufferMax`."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidError(PaddockError):
    """What was asked is malformed. Nothing was done."""

    reason = "Invalid"

    def __init__(
        self, message: str, *, problems: Sequence[FieldProblem] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)

    @classmethod
    def at(cls, path: str, message: str, *, hint: str | None = None) -> Self:
        """Say what is wrong with one field."""
        problem = FieldProblem(path, message)
        return cls(str(problem), problems=[problem], hint=hint)


class TooLargeError(InvalidError):
    """What was sent is larger than we take."""

    reason = "RequestEntityTooLarge"


class UnauthenticatedError(PaddockError):
    """No credential, or one we do not know."""

    reason = "Unauthorized"


class ForbiddenError(PaddockError):
    """The credential is known and does not allow this."""

    reason = "Forbidden"


class NotFoundError(PaddockError):
    """It does not exist, or the caller may not know that it does."""

    reason = "NotFound"


class AlreadyExistsError(PaddockError):
    """An object of that name exists."""

    reason = "AlreadyExists"


class ConflictError(PaddockError):
    """Somebody wrote the object since it was read, or its state forbids the action."""

    reason = "Conflict"


class GoneError(PaddockError):
    """The version asked for is no longer kept; list anew."""

    reason = "Expired"


class QuotaExceededError(PaddockError):
    """A quota would be exceeded. Waiting does not help; raising it does."""

    reason = "QuotaExceeded"


class RateLimitedError(PaddockError):
    """Too many at once; the same call succeeds later."""

    reason = "TooManyRequests"

    def __init__(
        self, message: str, *, retry_after_seconds: float = 1.0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class UnsupportedError(PaddockError):
    """This machine or driver cannot do that; the hint says what would be needed."""

    reason = "NotSupported"


class UnavailableError(PaddockError):
    """It cannot be done right now."""

    reason = "ServiceUnavailable"

    def __init__(
        self, message: str, *, retry_after_seconds: float | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceededError(PaddockError):
    """The caller's time was up before it was done."""

    reason = "Timeout"
