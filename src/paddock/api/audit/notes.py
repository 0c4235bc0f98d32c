"""What handlers leave in the ASGI scope for the audit log."""

from collections.abc import MutableMapping, Sequence
from typing import Any

from msgspec import Struct

from paddock.kit.errors import ForbiddenError, PaddockError

CALLER = "paddock.caller"
"""Key in an ASGI scope: the authenticated `Caller`."""
_NOTES = "paddock.audit"


class AuditCall(Struct, frozen=True):
    """The verb and the object of a route."""

    verb: str
    resource: str
    subresource: str = ""
    name: str = "id"
    """The parameter of the path that names the object."""


class AuditNotes(Struct):
    """What one request's handlers know about it."""

    call: AuditCall | None = None
    name: str = ""
    """The object's name, if the path does not contain it."""
    created: Sequence[str] = ()
    requested: int = 0
    """How many objects a batch should create."""
    reason: str = ""
    """The reason of the error response."""
    forbidden: str = ""
    """Why the caller was not allowed to do this."""

    def fail(self, error: PaddockError) -> None:
        """Note the error that the client gets."""
        self.reason = error.reason
        if isinstance(error, ForbiddenError):
            self.forbidden = error.message


def notes_of(scope: MutableMapping[str, Any]) -> AuditNotes:
    """Return the notes of a request, which handlers may change."""
    notes = scope.get(_NOTES)
    if notes is None:
        notes = scope[_NOTES] = AuditNotes()
    return notes
