"""The errors that cross layers.

    PaddockError
    ├── InvalidError            the request is malformed; carries field paths
    │   └── TooLargeError       … because it is too large
    ├── UnauthenticatedError    the caller is not known
    ├── ForbiddenError          the caller is known and not allowed
    ├── NotFoundError           it does not exist, or the caller may not see it
    │   └── ImageMissingError   … an image that could be pulled
    ├── AlreadyExistsError      the name is taken
    ├── ConflictError           a concurrent write, or the state does not allow it
    ├── GoneError               the requested version is no longer kept: list again
    ├── QuotaExceededError      a limit that only an operator can raise
    ├── RateLimitedError        too many at once; carries when to retry
    ├── UnsupportedError        this machine or driver cannot do that
    ├── UnstorableError         this sandbox, as it is now, cannot be stored with its memory
    ├── UnavailableError        not possible now; carries when to retry
    │   └── DiskFullError        … because the disk has no space to spare
    └── DeadlineExceededError   the caller's deadline passed

Below the HTTP layer there are no status codes; `paddock.api.errors` maps these to them.
"""

from collections.abc import Sequence
from typing import Self

import msgspec


class PaddockError(Exception):
    """Base class of Paddock's errors."""

    reason = "InternalError"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        """The next step, for people."""

    @property
    def advice(self) -> str:
        """The message and the next step: what a status says, where nobody reads a hint."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class FieldProblem(msgspec.Struct, frozen=True):
    """One thing wrong with one field."""

    path: str
    """Dotted, from the object's root: `spec.capacity.bufferMax`."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidError(PaddockError):
    """The request is malformed. Nothing was done."""

    reason = "Invalid"

    def __init__(
        self, message: str, *, problems: Sequence[FieldProblem] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)

    @classmethod
    def at(cls, path: str, message: str, *, hint: str | None = None) -> Self:
        """Return the error for one field."""
        problem = FieldProblem(path, message)
        return cls(str(problem), problems=[problem], hint=hint)


class TooLargeError(InvalidError):
    """The request is larger than the limit."""

    reason = "RequestEntityTooLarge"


class UnauthenticatedError(PaddockError):
    """The credential is missing or unknown."""

    reason = "Unauthorized"


class ForbiddenError(PaddockError):
    """The credential does not allow this."""

    reason = "Forbidden"


class NotFoundError(PaddockError):
    """The object does not exist, or the caller may not see it."""

    reason = "NotFound"


class ImageMissingError(NotFoundError):
    """The node does not have the image, or not for this team. A pull may help."""


class AlreadyExistsError(PaddockError):
    """An object of that name exists."""

    reason = "AlreadyExists"


class ConflictError(PaddockError):
    """The object was changed since it was read, or its state forbids the action."""

    reason = "Conflict"


class GoneError(PaddockError):
    """The requested version is no longer kept; list again."""

    reason = "Expired"


class QuotaExceededError(PaddockError):
    """A quota would be exceeded. Only an operator can raise it; retrying does not help."""

    reason = "QuotaExceeded"


class RateLimitedError(PaddockError):
    """Too many at once; the same call can succeed later."""

    reason = "TooManyRequests"

    def __init__(
        self, message: str, *, retry_after_seconds: float = 1.0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class UnsupportedError(PaddockError):
    """This machine or driver cannot do that; the hint says what is missing."""

    reason = "NotSupported"


class UnstorableError(PaddockError):
    """A sandbox has something that cannot be stored, such as a traced process. It is unchanged.

    Retrying helps only after the sandbox itself has changed.
    """

    reason = "Unstorable"


class UnavailableError(PaddockError):
    """Not possible right now."""

    reason = "ServiceUnavailable"

    def __init__(
        self, message: str, *, retry_after_seconds: float | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class DiskFullError(UnavailableError):
    """The disk has no space beyond its reserve. Retrying helps once something was deleted."""

    reason = "InsufficientStorage"


class DeadlineExceededError(PaddockError):
    """The caller's deadline passed before the work was done."""

    reason = "Timeout"
