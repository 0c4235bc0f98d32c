"""Load the working set from the database file at start-up."""

import gc
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paddock.kit.errors import InvalidError, UnavailableError
from paddock.kit.logs import fields
from paddock.resources import codec
from paddock.resources.meta import Key, Resource
from paddock.store.interning import Interner
from paddock.store.port import Change
from paddock.store.semantics import stamped
from paddock.store.sqlite.database import Database
from paddock.store.table import Entry
from paddock.store.working_set import FIRST_VERSION, WorkingSet

log = logging.getLogger(__name__)


def load(database: Database, kinds: Sequence[type[Resource]], *, history: int) -> WorkingSet:
    """Load every object and the history."""
    # Loading creates no garbage, and the collector would take longer than the loading.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        return _load(database, kinds, history)
    finally:
        if was_collecting:
            gc.enable()


def _load(database: Database, kinds: Sequence[type[Resource]], history: int) -> WorkingSet:
    by_name = {kind.KIND: kind for kind in kinds}
    working = WorkingSet(kinds, version=max(database.version(), FIRST_VERSION), history=history)
    objects = _objects(database, by_name)
    entries = _entries(database, by_name, objects)
    for kind in kinds:
        working.table(kind).load(
            objects[kind.KIND],
            entries[kind.KIND],
            compacted=max(database.compacted, FIRST_VERSION),
        )
        for key, obj in objects[kind.KIND].items():
            if obj.metadata.owner_references:
                working.index((kind, key), obj)
    return working


def _objects(database: Database, by_name: dict[str, type[Resource]]) -> dict[str, dict[Key, Any]]:
    objects: dict[str, dict[Key, Any]] = {name: {} for name in by_name}
    unknown: Counter[str] = Counter()
    interner = Interner()
    for kind, body in database.objects():
        cls = by_name.get(kind)
        if cls is None:
            unknown[kind] += 1
            continue
        obj = _decoded(cls, body)
        interner.share(obj)
        objects[kind][obj.key] = obj
    for kind, count in unknown.items():
        # They stay in the file for the version that supports them: a downgrade loses nothing.
        log.warning("objects of an unknown kind", extra=fields(kind=kind, count=count))
    return objects


def _entries(
    database: Database,
    by_name: dict[str, type[Resource]],
    objects: dict[str, dict[Key, Any]],
) -> dict[str, list[Entry[Any]]]:
    """Rebuild the history from the undo log: the result of a change is what the next replaced."""
    entries: dict[str, list[Entry[Any]]] = {name: [] for name in by_name}
    replaced: dict[tuple[str, Key], Resource | None] = {}
    for version, kind, namespace, name, before in database.changes():
        cls = by_name.get(kind)
        if cls is None:
            continue
        key = Key(namespace, name)
        old = None if before is None else _decoded(cls, before)
        place = (kind, key)
        after = replaced[place] if place in replaced else objects[kind].get(key)
        replaced[place] = old
        if after is not None:
            change = Change.ADDED if old is None else Change.MODIFIED
            entries[kind].append(Entry(version, change, after, old))
        elif old is not None:
            entries[kind].append(Entry(version, Change.DELETED, stamped(old, version), old))
    for kept in entries.values():
        kept.reverse()
    return entries


def _decoded(cls: type[Resource], body: bytes) -> Resource:
    try:
        return codec.decode(cls, body)
    except InvalidError as error:
        raise UnavailableError(
            f"a stored {cls.KIND} cannot be decoded: {error.message}; it begins {body[:200]!r}",
            hint="start the version that wrote it, or restore a backup of the store",
        ) from error
