"""The visible objects of one kind, and the recent history for continued lists and watches.

The history is one bounded list of entries that every watcher reads at its own position: a slow
watcher needs no buffer, and gets `GoneError` when its position was compacted. Each entry holds the
object before and after, so that a page can be read at an earlier version, and a watch with
selectors can report objects that start or stop matching.

Used on the thread of the event loop only. Changes that are not durable yet are in `working_set`.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Iterable, Iterator
from heapq import merge
from typing import Any, Generic, NamedTuple

from paddock.kit.errors import GoneError
from paddock.resources import codec
from paddock.resources.meta import Key, R
from paddock.store.port import Change, Page, WatchEvent
from paddock.store.selection import Predicate
from paddock.store.semantics import stamped
from paddock.store.tokens import encode_token

DEFAULT_HISTORY = 8192
"""Minimum number of entries per kind; at twice as many, the older half is dropped."""
HISTORY_BYTES = 64 * 1024 * 1024
"""Approximate limit for the entries of one kind; large objects have a shorter history."""
BOOKMARK_EVERY = 500
"""A watcher without events for this many versions gets a bookmark."""
_FEW_KEYS = 32
_MEASURE_EVERY = 64
_YIELD_EVERY = 128
"""Entries sent to one watcher before it yields to other tasks."""


class VisibleVersion:
    """The newest visible version of a store; shared by its tables."""

    def __init__(self, visible: int) -> None:
        self.visible = visible
        """The newest version, of any kind, that readers may see."""


class Entry(NamedTuple, Generic[R]):
    """One change of one object."""

    version: int
    change: Change
    object: R
    """The object after the change; for DELETED as last stored, at the version of its deletion."""
    old: R | None
    """The object before the change."""


class Table(Generic[R]):
    """Objects of one kind by key."""

    def __init__(
        self, kind: type[R], visible_version: VisibleVersion, *, history: int = DEFAULT_HISTORY
    ) -> None:
        self.kind = kind
        self.objects: dict[Key, R] = {}
        self._visible_version = visible_version
        self._history = history
        self._limit = history
        self._compacted = visible_version.visible
        self._entries: list[Entry[R]] = []
        self._base = 0
        self._keys: list[Key] = []
        self._added_keys: set[Key] = set()
        self._removed_keys: set[Key] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._is_closed = False

    # ---- changes -------------------------------------------------------------------------

    def load(self, objects: dict[Key, R], entries: list[Entry[R]], *, compacted: int) -> None:
        """Load objects and history from a backend; the history starts after version `compacted`."""
        self.objects = objects
        self._keys = sorted(objects)
        self._entries = entries
        self._compacted = compacted

    def apply(self, entry: Entry[R], key: Key) -> None:
        """Make one change visible."""
        if entry.change is Change.DELETED:
            del self.objects[key]
            if key in self._added_keys:
                self._added_keys.discard(key)
            else:
                self._removed_keys.add(key)
        else:
            self.objects[key] = entry.object
            if entry.change is Change.ADDED:
                if key in self._removed_keys:
                    self._removed_keys.discard(key)
                else:
                    self._added_keys.add(key)
        self._entries.append(entry)
        if (self._base + len(self._entries)) % _MEASURE_EVERY == 0:
            self._limit = history_within(self._history, len(codec.encode(entry.object)))
        if len(self._entries) >= 2 * self._limit:
            surplus = len(self._entries) - self._limit
            self._compacted = self._entries[surplus - 1].version
            del self._entries[:surplus]
            self._base += surplus
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        """Wake every watcher."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        """End every watch."""
        self._is_closed = True
        self.wake()

    # ---- listing -------------------------------------------------------------------------

    def page(
        self,
        *,
        namespace: str | None,
        matches: Predicate | None,
        limit: int | None,
        at: int | None = None,
        after: Key | None = None,
    ) -> Page[R]:
        """Return the objects at a version in key order, starting after a key."""
        version = self._visible_version.visible if at is None else at
        before = self._before(version)
        keys, start, end = self._range(namespace, after)
        deleted_since = sorted(
            key
            for key, old in before.items()
            if old is not None
            and key not in self.objects
            and _is_in(key, namespace)
            and (after is None or key > after)
        )
        items: list[R] = []
        last = Key("", "")
        for key in _merged(keys, start, end, deleted_since):
            obj = before[key] if key in before else self.objects[key]
            if obj is None or (matches is not None and not matches(obj)):
                continue
            if limit is not None and len(items) == limit:
                left = None
                if matches is None:
                    created_later = (
                        key
                        for key, old in before.items()
                        if old is None and key in self.objects and _is_in(key, namespace)
                    )
                    left = end - bisect_right(keys, last) + _after(deleted_since, last)
                    left -= _after(created_later, last)
                return Page(tuple(items), str(version), encode_token(version, last), left)
            items.append(obj)
            last = key
        return Page(tuple(items), str(version))

    def keys_in(self, namespace: str) -> list[Key]:
        """Return the keys of one namespace."""
        keys, start, end = self._range(namespace, None)
        return keys[start:end]

    def _before(self, version: int) -> dict[Key, R | None]:
        """Return the objects that changed after a version, as they were at that version."""
        if version == self._visible_version.visible:
            return {}
        self._check_kept(version)
        before: dict[Key, R | None] = {}
        for entry in self._entries[self._index_after(version) :]:
            before.setdefault(entry.object.key, entry.old)
        return before

    def _range(self, namespace: str | None, after: Key | None) -> tuple[list[Key], int, int]:
        keys = self._sorted_keys()
        start, end = 0, len(keys)
        if namespace:
            start = bisect_left(keys, Key(namespace, ""))
            end = _end_of(keys, namespace, start)
        if after is not None:
            start = max(start, bisect_right(keys, after))
        return keys, start, end

    def _sorted_keys(self) -> list[Key]:
        if len(self._added_keys) + len(self._removed_keys) > _FEW_KEYS:
            kept = [key for key in self._keys if key not in self._removed_keys]
            kept.extend(self._added_keys)
            kept.sort()
            self._keys = kept
        else:
            for key in self._removed_keys:
                del self._keys[bisect_left(self._keys, key)]
            for key in self._added_keys:
                self._keys.insert(bisect_left(self._keys, key), key)
        self._added_keys.clear()
        self._removed_keys.clear()
        return self._keys

    # ---- watching ------------------------------------------------------------------------

    async def watch(
        self, since: int | None, *, namespace: str | None, matches: Predicate | None
    ) -> AsyncGenerator[WatchEvent[R], None]:
        """Stream the changes after a version; without one, the existing objects first."""
        if since is None:
            position, sent = self._base + len(self._entries), self._visible_version.visible
            for obj in self.page(namespace=namespace, matches=matches, limit=None).items:
                yield WatchEvent(Change.ADDED, obj, obj.metadata.resource_version)
            yield WatchEvent(Change.BOOKMARK, None, str(sent))
        else:
            self._check_kept(since)
            position, sent = self._base + self._index_after(since), since
        read = 0
        while not self._is_closed:
            if position < self._base:
                raise GoneError(
                    f"this watch of {self.kind.PLURAL} is more than {self._limit} changes behind",
                    hint="list again and watch from the list's version",
                )
            if position < self._base + len(self._entries):
                entry = self._entries[position - self._base]
                position += 1
                event = _event(entry, matches)
                if event is not None:
                    sent = entry.version
                    yield event
                read += 1
                if read % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            elif self._visible_version.visible - sent >= BOOKMARK_EVERY:
                sent = self._visible_version.visible
                yield WatchEvent(Change.BOOKMARK, None, str(sent))
            else:
                await self._next_change()

    async def _next_change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._waiting = [other for other in self._waiting if other is not future]

    def _check_kept(self, version: int) -> None:
        if version < self._compacted:
            raise GoneError(
                f"version {version} of {self.kind.PLURAL} is no longer kept; "
                f"the oldest kept is {self._compacted}",
                hint="list again and continue from the list's version",
            )
        visible = self._visible_version.visible
        if version > visible:
            raise GoneError(
                f"version {version} is newer than this store, which is at {visible}",
                hint="list again and continue from the list's version",
            )

    def _index_after(self, version: int) -> int:
        return bisect_right(self._entries, version, key=_entry_version)


def history_within(count: int, object_bytes: int) -> int:
    """Return how many changes are kept for objects of this size: at most `count`."""
    return max(1, min(count, HISTORY_BYTES // max(1, object_bytes)))


def _entry_version(entry: Entry[Any]) -> int:
    return entry.version


def _merged(keys: list[Key], start: int, end: int, deleted_since: list[Key]) -> Iterator[Key]:
    present = map(keys.__getitem__, range(start, end))
    return merge(present, deleted_since) if deleted_since else present


def _end_of(keys: list[Key], namespace: str, start: int) -> int:
    """Return the end of a namespace. Searches near its start first, as most are small."""
    near, step = start, 32
    while near < len(keys) and keys[near].namespace == namespace:
        near, step = near + step, step * 2
    return bisect_left(keys, Key(namespace + "\0", ""), start, min(near, len(keys)))


def _is_in(key: Key, namespace: str | None) -> bool:
    return not namespace or key.namespace == namespace


def _after(keys: Iterable[Key], last: Key) -> int:
    return sum(1 for key in keys if key > last)


def _event(entry: Entry[R], matches: Predicate | None) -> WatchEvent[R] | None:
    """Return the event for a watcher with this selector; `None` if it gets none."""
    obj, old = entry.object, entry.old
    if matches is None:
        return WatchEvent(entry.change, obj, str(entry.version))
    before = old is not None and matches(old)
    after = entry.change is not Change.DELETED and matches(obj)
    if after:
        return WatchEvent(Change.MODIFIED if before else Change.ADDED, obj, str(entry.version))
    if before and old is not None:
        gone = obj if entry.change is Change.DELETED else stamped(old, entry.version)
        return WatchEvent(Change.DELETED, gone, str(entry.version))
    return None
