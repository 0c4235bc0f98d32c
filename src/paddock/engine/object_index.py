"""The objects of one kind with indexes and subscribers, without I/O.

`informer` updates it from the store, `paddock.cache.writes` with the results of its own writes.

- Versions never go back: a late list or a repeated event does not replace a newer object.
- After `observe` (or `observe_deleted`) of a write's result no older version is read here.
- An object recreated under the same name is another one: handlers see a deletion, then a creation.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeAlias

from msgspec import Struct

from paddock.engine.indexes import Indexes, IndexFunction
from paddock.engine.tombstones import Tombstones
from paddock.engine.versions import ordinal, version_of
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.logs import fields
from paddock.resources.meta import Key, R, Resource
from paddock.resources.selectors import LabelSelector
from paddock.store.port import Change, WatchEvent

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[R | None, R | None], None]
"""Called with the old and the new object; `None` means absent."""

_EVENTS = metrics.counter(
    "paddock_informer_events_total", "Changes taken in, by kind and change.", ("kind", "change")
)
_HANDLER_ERRORS = metrics.counter(
    "paddock_informer_handler_errors_total", "Handlers that raised.", ("kind",)
)


class Filter(Struct, frozen=True, kw_only=True):
    """The part of a kind that is cached."""

    namespace: str | None = None
    labels: LabelSelector | None = None


class ObjectIndex(Generic[R]):
    """The objects of one kind by key and by index."""

    def __init__(
        self,
        kind: type[R],
        clock: Clock,
        *,
        indexes: Mapping[str, IndexFunction[R]],
        only: Filter,
        transform: Callable[[R], R] | None,
    ) -> None:
        self.kind = kind
        self._only = only
        self._transform = transform
        self._objects: dict[Key, R] = {}
        self._indexes: Indexes[R] = Indexes(indexes)
        self._handlers: tuple[Handler[R], ...] = ()
        self._tombstones = Tombstones(clock)
        self._since = ""
        """The version from which to watch."""
        self._seen = 0
        """Every change up to this version is applied."""
        self._count = {
            change: _EVENTS.labels(kind.KIND, change.value.lower())
            for change in (Change.ADDED, Change.MODIFIED, Change.DELETED)
        }

    # ---- reading -------------------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Every change up to this version is applied."""
        return self._seen

    def get(self, key: Key) -> R | None:
        """Return the object, or `None`."""
        return self._objects.get(key)

    def all(self) -> tuple[R, ...]:
        """Return every object."""
        return tuple(self._objects.values())

    def by_index(self, name: str, value: Hashable) -> tuple[R, ...]:
        """Return the objects with this value; safe to keep."""
        return tuple(self._indexes.view(name, value))

    def view(self, name: str, value: Hashable) -> Collection[R]:
        """Return the live collection behind `by_index`, uncopied: valid until the next `await`."""
        return self._indexes.view(name, value)

    def index_values(self, name: str) -> Collection[Hashable]:
        """Return every value of an index: valid until the next `await`."""
        return self._indexes.values(name)

    def __len__(self) -> int:
        return len(self._objects)

    # ---- subscriptions -------------------------------------------------------------------------

    def subscribe(self, handler: Handler[R]) -> Callable[[], None]:
        """Call the handler with every present object, then with every change."""
        for obj in tuple(self._objects.values()):
            self._call(handler, None, obj)
        self._handlers = (*self._handlers, handler)

        def unsubscribe() -> None:
            self._handlers = tuple(item for item in self._handlers if item is not handler)

        return unsubscribe

    # ---- read your writes ----------------------------------------------------------------

    def observe(self, obj: R) -> None:
        """Apply the result of a write of this process, ahead of the watch."""
        version = version_of(obj)
        known = self._objects.get(obj.key)
        is_last = known is not None and known.metadata.uid == obj.metadata.uid and _is_over(obj)
        if is_last:
            # An API server returns the last version with the write that removes an object.
            self.observe_deleted(obj)
            return
        if version <= self._seen:
            # The watch is past this write: what it delivered since (perhaps a deletion) is
            # newer.
            return
        if obj.is_deleting and not obj.metadata.finalizers:
            self.observe_deleted(obj)
        else:
            self._upsert(obj, version)

    def observe_deleted(self, obj: R) -> None:
        """Apply that a write of this process removed the object."""
        key, uid, version = obj.key, obj.metadata.uid, version_of(obj)
        self._tombstones.add(key, uid=uid, up_to=version)
        known = self._objects.get(key)
        # An older object of this name, whose deletion is not delivered yet, is gone as well.
        if known is not None and (known.metadata.uid == uid or version_of(known) < version):
            self._drop(known)

    # ---- from the store ----------------------------------------------------------------

    def _apply(self, event: WatchEvent[R]) -> None:
        version = ordinal(event.version)
        if version < self._seen:
            return  # Applied before; applying it again could restore a deleted object.
        obj = event.object
        if obj is not None and event.change is Change.DELETED:
            known = self._objects.get(obj.key)
            self._tombstones.forget(obj.key, uid=obj.metadata.uid, version=version)
            if known is not None and version_of(known) < version:
                self._drop(known)
        elif obj is not None and event.change is not Change.BOOKMARK:
            self._upsert(obj, version_of(obj))
        self._since, self._seen = event.version, version

    def _list_is_complete(self, listed: Collection[Key], version: str, started: float) -> None:
        """Apply that no other objects existed at this version."""
        moment = ordinal(version)
        # What the list did not have was deleted in the gap, unless it is newer than the list:
        # a write of this process, whose event is still to come.
        for key, obj in tuple(self._objects.items()):
            if key not in listed and version_of(obj) <= moment:
                self._drop(obj)
        self._tombstones.forget_before(started)
        self._since, self._seen = version, moment

    # ---- changes ---------------------------------------------------------------------

    def _upsert(self, obj: R, version: int) -> None:
        key = obj.key
        known = self._objects.get(key)
        if known is not None and version_of(known) >= version:
            return
        if self._tombstones.covers(key, uid=obj.metadata.uid, version=version):
            return
        if not self._selects(obj):
            # Only a write of this process can show an object leaving the selection this way;
            # older events of the same object, still under way, must not bring it back.
            self._tombstones.add(key, uid="", up_to=version)
            if known is not None:
                self._drop(known)
            return
        if known is not None and known.metadata.uid != obj.metadata.uid:
            # Recreated under the same name: for handlers, the old one is deleted.
            self._drop(known)
            known = None
        kept = obj if self._transform is None else self._transform(obj)
        self._objects[key] = kept
        self._indexes.change(key, known, kept)
        self._count[Change.ADDED if known is None else Change.MODIFIED].inc()
        self._deliver(known, kept)

    def _drop(self, known: R) -> None:
        key = known.key
        del self._objects[key]
        self._indexes.change(key, known, None)
        self._count[Change.DELETED].inc()
        self._deliver(known, None)

    def _selects(self, obj: R) -> bool:
        only = self._only
        if only.namespace is not None and obj.metadata.namespace != only.namespace:
            return False
        return only.labels is None or only.labels.matches(obj.metadata.labels)

    def _deliver(self, old: R | None, new: R | None) -> None:
        for handler in self._handlers:
            self._call(handler, old, new)

    def _call(self, handler: Handler[R], old: R | None, new: R | None) -> None:
        try:
            handler(old, new)
        except Exception:
            # One failing handler must stop neither the others nor the informer.
            _HANDLER_ERRORS.labels(self.kind.KIND).inc()
            log.exception("informer handler failed", extra=fields(kind=self.kind.KIND))


def _is_over(obj: Resource) -> bool:
    """Whether a deleted object has no finalizers and, as pods have, no grace period left."""
    meta = obj.metadata
    return obj.is_deleting and not meta.finalizers and not meta.deletion_grace_period_seconds
