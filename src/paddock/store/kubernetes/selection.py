"""Client-side field selection, for fields that the API server does not support.

An API server selects custom objects by name, namespace and the fields their CRD declares
(`selectableFields`), built-in kinds by a few fields. Fields that it rejects are recorded here and
filtered in the client with the same semantics: an object that stops matching is DELETED for its
watcher.
"""

import re
from typing import Generic

from paddock.kit.errors import InvalidError
from paddock.resources.meta import Key, R, Resource
from paddock.resources.selectors import FieldSelector, FieldTerm
from paddock.store.kubernetes import statuses
from paddock.store.port import Change, WatchEvent
from paddock.store.selection import Predicate, field_text, predicate

_NAMED_FIELD = re.compile(r"field label not supported: (\S+)")


class ServerFields:
    """The fields that the server rejected, by kind."""

    def __init__(self) -> None:
        self._rejected: dict[type[Resource], set[tuple[str, ...]]] = {}

    def split(
        self, kind: type[Resource], fields: FieldSelector | None
    ) -> tuple[FieldSelector | None, FieldSelector | None]:
        """Return the selector for the server and the one for the client; `None` if empty."""
        if fields is None or not fields.terms:
            return None, None
        rejected = self._rejected.get(kind, set())
        server: list[FieldTerm] = []
        client: list[FieldTerm] = []
        for term in fields.terms:
            by_client = term.path in rejected or _is_about_default(kind, term)
            (client if by_client else server).append(term)
        return _selector(server), _selector(client)

    def note_rejected(
        self, kind: type[Resource], fields: FieldSelector | None, error: InvalidError
    ) -> bool:
        """Record a rejected selector; returns whether a retry can succeed."""
        server, _ = self.split(kind, fields)
        if server is None or not statuses.rejects_selector(error):
            return False
        known = self._rejected.setdefault(kind, set())
        sent = {term.path for term in server.terms if term.path[0] != "metadata"}
        named = {tuple(path.split(".")) for path in _NAMED_FIELD.findall(error.message)}
        new = (sent & named) or sent
        known |= new
        return bool(new)


def _is_about_default(kind: type[Resource], term: FieldTerm) -> bool:
    """Whether the term is about a default value, which is not stored and unknown to the server."""
    default = field_text(kind(), term.path)
    return default != "" and term.value in (default, "")


def _selector(terms: list[FieldTerm]) -> FieldSelector | None:
    return FieldSelector(tuple(terms)) if terms else None


def matches(fields: FieldSelector) -> Predicate:
    """Return the predicate for the client's part of a selector."""
    return predicate(fields=fields) or (lambda _: True)


class FilteredWatch(Generic[R]):
    """Converts events of all objects into events of the objects that match."""

    def __init__(self, fields: FieldSelector) -> None:
        self._matches = matches(fields)
        self._matched: dict[Key, bool] = {}
        """Whether an object matched; objects not seen yet may have matched before."""

    def start(self, obj: R) -> None:
        """Record an object that matched before the watch began."""
        self._matched[obj.key] = True

    def translate(self, event: WatchEvent[R]) -> WatchEvent[R]:
        """Return the event for a watcher of the selection; a bookmark if there is none."""
        obj = event.object
        if obj is None:
            return event
        before = self._matched.get(obj.key)
        if event.change is Change.DELETED:
            self._matched.pop(obj.key, None)
            shown = before or (before is None and self._matches(obj))
            return event if shown else _bookmark(event)
        now = self._matches(obj)
        self._matched[obj.key] = now
        if now:
            change = Change.ADDED if before is False else event.change
            return WatchEvent(change, obj, event.version)
        if before or (before is None and event.change is Change.MODIFIED):
            return WatchEvent(Change.DELETED, obj, event.version)
        return _bookmark(event)


def _bookmark(event: WatchEvent[R]) -> WatchEvent[R]:
    return WatchEvent(Change.BOOKMARK, None, event.version)
