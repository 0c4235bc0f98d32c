"""Selecting by fields where the server cannot.

An API server selects custom objects by name, namespace and the fields their CRD declares
(`selectableFields`), built-in ones by a few of their own. What it refuses is remembered here and
filtered on our side, with the meaning a server would give it: an object that stops matching is
DELETED to its watcher.
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
    """What servers were found unable to select by, per kind."""

    def __init__(self) -> None:
        self._refused: dict[type[Resource], set[tuple[str, ...]]] = {}

    def split(
        self, kind: type[Resource], fields: FieldSelector | None
    ) -> tuple[FieldSelector | None, FieldSelector | None]:
        """Return the part for the server and the part for us; `None` is an empty part."""
        if fields is None or not fields.terms:
            return None, None
        refused = self._refused.get(kind, set())
        theirs: list[FieldTerm] = []
        ours: list[FieldTerm] = []
        for term in fields.terms:
            hidden = term.path in refused or _is_about_default(kind, term)
            (ours if hidden else theirs).append(term)
        return _selector(theirs), _selector(ours)

    def learn(
        self, kind: type[Resource], fields: FieldSelector | None, error: InvalidError
    ) -> bool:
        """Take note of a refusal; say whether asking again makes sense."""
        theirs, _ = self.split(kind, fields)
        if theirs is None or not statuses.refuses_selector(error):
            return False
        known = self._refused.setdefault(kind, set())
        asked = {term.path for term in theirs.terms if term.path[0] != "metadata"}
        named = {tuple(path.split(".")) for path in _NAMED_FIELD.findall(error.message)}
        new = (asked & named) or asked
        known |= new
        return bool(new)


def _is_about_default(kind: type[Resource], term: FieldTerm) -> bool:
    """Servers see what is written, and a field that holds its default is not."""
    default = field_text(kind(), term.path)
    return default != "" and term.value in (default, "")


def _selector(terms: list[FieldTerm]) -> FieldSelector | None:
    return FieldSelector(tuple(terms)) if terms else None


def matches(fields: FieldSelector) -> Predicate:
    """Return the test for our part of a selector."""
    return predicate(fields=fields) or (lambda _: True)


class FilteredWatch(Generic[R]):
    """Turns the changes of all objects into the changes of those that match."""

    def __init__(self, fields: FieldSelector) -> None:
        self._matches = matches(fields)
        self._matched: dict[Key, bool] = {}
        """What is known of objects seen; of others we cannot know whether they matched before."""

    def start(self, obj: R) -> None:
        """Record an object that matched before the watch began."""
        self._matched[obj.key] = True

    def translate(self, event: WatchEvent[R]) -> WatchEvent[R]:
        """Return the event as a watcher of the selection sees it; nothing to see is a bookmark."""
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
