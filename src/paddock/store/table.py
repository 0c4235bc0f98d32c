"""The visible objects of one kind, and the recent history that lists and watches look back on.

The history is one bounded run of entries that every watcher reads at its own place: a slow
watcher costs no memory, and finds out by `GoneError` that the run has moved on. Each entry holds
the object before and after, so that a page can be taken of an earlier version, and a watch by
selector can report objects that start or stop matching.

Everything here happens on the event loop's thread. What is not durable yet is not here.
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
"""Entries kept per kind, at least; twice as many before the older half goes."""
HISTORY_BYTES = 64 * 1024 * 1024
"""What the kept entries of one kind may weigh, about; large objects are kept for fewer changes."""
BOOKMARK_EVERY = 500
"""A watcher without events for this many versions gets a bookmark."""
_FEW_KEYS = 32
_WEIGH_EVERY = 64
_YIELD_EVERY = 128
"""Entries given to one watcher before others get a turn."""


class Horizon:
    """How far this store has come; shared by its tables."""

    def __init__(self, visible: int) -> None:
        self.visible = visible
        """The newest version, of any kind, that readers may see."""


class Entry(NamedTuple, Generic[R]):
    """One change of one object."""

    version: int
    change: Change
    object: R
    """As it is after the change; for DELETED as it was last, at the version of its deletion."""
    old: R | None
    """As it was before."""


class Table(Generic[R]):
    """Objects of one kind by key."""

    def __init__(self, kind: type[R], horizon: Horizon, *, history: int = DEFAULT_HISTORY) -> None:
        self.kind = kind
        self.objects: dict[Key, R] = {}
        self._horizon = horizon
        self._history = history
        self._allowance = history
        self._compacted = horizon.visible
        self._entries: list[Entry[R]] = []
        self._base = 0
        self._keys: list[Key] = []
        self._new_keys: set[Key] = set()
        self._old_keys: set[Key] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._is_closed = False

    # ---- filling -------------------------------------------------------------------------

    def load(self, objects: dict[Key, R], entries: list[Entry[R]], *, compacted: int) -> None:
        """Take over what a backend kept; entries before `compacted` and at it are lost."""
        self.objects = objects
        self._keys = sorted(objects)
        self._entries = entries
        self._compacted = compacted

    def apply(self, entry: Entry[R], key: Key) -> None:
        """Make one change visible."""
        if entry.change is Change.DELETED:
            del self.objects[key]
            if key in self._new_keys:
                self._new_keys.discard(key)
            else:
                self._old_keys.add(key)
        else:
            self.objects[key] = entry.object
            if entry.change is Change.ADDED:
                if key in self._old_keys:
                    self._old_keys.discard(key)
                else:
                    self._new_keys.add(key)
        self._entries.append(entry)
        if (self._base + len(self._entries)) % _WEIGH_EVERY == 0:
            self._allowance = history_within(self._history, len(codec.encode(entry.object)))
        if len(self._entries) >= 2 * self._allowance:
            surplus = len(self._entries) - self._allowance
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
        """Return the objects in key order as they were at a version, beginning after a key."""
        version = self._horizon.visible if at is None else at
        undo = self._undo(version)
        keys, start, end = self._range(namespace, after)
        revived = sorted(
            key
            for key, old in undo.items()
            if old is not None
            and key not in self.objects
            and _is_in(key, namespace)
            and (after is None or key > after)
        )
        items: list[R] = []
        last = Key("", "")
        for key in _merged(keys, start, end, revived):
            obj = undo[key] if key in undo else self.objects[key]
            if obj is None or (matches is not None and not matches(obj)):
                continue
            if limit is not None and len(items) == limit:
                left = None
                if matches is None:
                    created_later = (
                        key
                        for key, old in undo.items()
                        if old is None and key in self.objects and _is_in(key, namespace)
                    )
                    left = end - bisect_right(keys, last) + _after(revived, last)
                    left -= _after(created_later, last)
                return Page(tuple(items), str(version), encode_token(version, last), left)
            items.append(obj)
            last = key
        return Page(tuple(items), str(version))

    def keys_in(self, namespace: str) -> list[Key]:
        """Return the keys of one namespace."""
        keys, start, end = self._range(namespace, None)
        return keys[start:end]

    def _undo(self, version: int) -> dict[Key, R | None]:
        """Return what has changed since a version, as it was then."""
        if version == self._horizon.visible:
            return {}
        self._check_kept(version)
        undo: dict[Key, R | None] = {}
        for entry in self._entries[self._index_after(version) :]:
            undo.setdefault(entry.object.key, entry.old)
        return undo

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
        if len(self._new_keys) + len(self._old_keys) > _FEW_KEYS:
            kept = [key for key in self._keys if key not in self._old_keys]
            kept.extend(self._new_keys)
            kept.sort()
            self._keys = kept
        else:
            for key in self._old_keys:
                del self._keys[bisect_left(self._keys, key)]
            for key in self._new_keys:
                self._keys.insert(bisect_left(self._keys, key), key)
        self._new_keys.clear()
        self._old_keys.clear()
        return self._keys

    # ---- watching ------------------------------------------------------------------------

    async def watch(
        self, since: int | None, *, namespace: str | None, matches: Predicate | None
    ) -> AsyncGenerator[WatchEvent[R], None]:
        """Return the changes after a version, or first what is there; ends when the store does."""
        if since is None:
            place, sent = self._base + len(self._entries), self._horizon.visible
            for obj in self.page(namespace=namespace, matches=matches, limit=None).items:
                yield WatchEvent(Change.ADDED, obj, obj.metadata.resource_version)
            yield WatchEvent(Change.BOOKMARK, None, str(sent))
        else:
            self._check_kept(since)
            place, sent = self._base + self._index_after(since), since
        taken = 0
        while not self._is_closed:
            if place < self._base:
                raise GoneError(
                    f"this watch of {self.kind.PLURAL} fell more than {self._allowance} changes "
                    "behind",
                    hint="list again and watch from the list's version",
                )
            if place < self._base + len(self._entries):
                entry = self._entries[place - self._base]
                place += 1
                event = _seen(entry, matches)
                if event is not None:
                    sent = entry.version
                    yield event
                taken += 1
                if taken % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            elif self._horizon.visible - sent >= BOOKMARK_EVERY:
                sent = self._horizon.visible
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
        if version > self._horizon.visible:
            raise GoneError(
                f"version {version} is not of this store, which is at {self._horizon.visible}",
                hint="list again and continue from the list's version",
            )

    def _index_after(self, version: int) -> int:
        return bisect_right(self._entries, version, key=_entry_version)


def history_within(count: int, object_bytes: int) -> int:
    """Return how many changes of objects of this size are kept, where `count` are asked for."""
    return max(1, min(count, HISTORY_BYTES // max(1, object_bytes)))


def _entry_version(entry: Entry[Any]) -> int:
    return entry.version


def _merged(keys: list[Key], start: int, end: int, revived: list[Key]) -> Iterator[Key]:
    present = map(keys.__getitem__, range(start, end))
    return merge(present, revived) if revived else present


def _end_of(keys: list[Key], namespace: str, start: int) -> int:
    """Find where a namespace ends, looking near its beginning first: most are small."""
    near, step = start, 32
    while near < len(keys) and keys[near].namespace == namespace:
        near, step = near + step, step * 2
    return bisect_left(keys, Key(namespace + "\0", ""), start, min(near, len(keys)))


def _is_in(key: Key, namespace: str | None) -> bool:
    return not namespace or key.namespace == namespace


def _after(keys: Iterable[Key], last: Key) -> int:
    return sum(1 for key in keys if key > last)


def _seen(entry: Entry[R], matches: Predicate | None) -> WatchEvent[R] | None:
    """Return a change as a watcher with this selector sees it; `None` if it does not."""
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
