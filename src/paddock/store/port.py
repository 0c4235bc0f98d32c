"""The Store port: durable resources with Kubernetes' semantics.

Objects are frozen and may be shared. Every write returns the object as stored.

- `create` fills uid, resourceVersion, generation 1, creationTimestamp and, from `generateName`,
  the name. `status` of what is created is kept empty (it is its own subresource) unless the
  backend is asked to keep it by `with_status=True`.
- `update` writes metadata and spec, and leaves status; `update_status` writes status, and leaves
  the rest. Both name the version read in `metadata.resourceVersion`: a stale one is a
  `ConflictError`, an empty one an `InvalidError`. Generation grows when the spec changes, and only
  then. A write that changes nothing returns the object as it is and makes no event.
- Identity (uid, creationTimestamp, deletionTimestamp, generation, namespace, name) is the
  store's: what a writer puts there is ignored, except that a differing uid is a `ConflictError`.
- What breaks a rule of its kind is an `InvalidError` that names every field; what cannot be stored
  now is an `UnavailableError`. Either way nothing was done. `dry_run` checks everything, answers
  as the write would, and does nothing.
- `delete` of an object with finalizers sets deletionTimestamp; it goes when the last finalizer
  does, and takes no new ones until then. (A cluster counts the beginning of deletion as a
  generation, embedded stores do not.) `Background` collects dependents afterwards, `Foreground`
  before, `Orphan` unties them. A dependent whose owners (by uid) are all gone is collected.
- Versions are one sequence over all kinds of a store, and never go back.
- `list` gives a consistent page and the version to watch from. `watch` replays every change after
  `since`, in order, then goes on; `GoneError` says that `since` is no longer kept: list anew.
  Without `since` it begins with the present objects as ADDED. To a watch with selectors, objects
  that begin to match are ADDED and those that cease to are DELETED. DELETED shows the object as it
  was stored last, at the version of its end. A BOOKMARK may come at any time.
- Read your writes: after a write has returned, no read or list of this store is older.
"""

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Generic, Protocol

from msgspec import Struct

from paddock.resources.meta import Key, R
from paddock.resources.selectors import FieldSelector, LabelSelector


class Propagation(StrEnum):
    """What deletion does to dependents."""

    BACKGROUND = "Background"
    FOREGROUND = "Foreground"
    ORPHAN = "Orphan"


class Change(StrEnum):
    """What happened to an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """Nothing happened; `version` says how far the watcher has seen."""


class WatchEvent(Struct, Generic[R], frozen=True):
    """One change, with the object as it is after it (for DELETED: as it was last)."""

    change: Change
    object: R | None
    version: str


class Page(Struct, Generic[R], frozen=True):
    """Part of a list."""

    items: tuple[R, ...]
    version: str
    """Where to watch from; the same on every page of one list."""
    continue_token: str = ""
    """Empty on the last page."""
    remaining: int | None = None


class Store(Protocol):
    """Durable resources."""

    async def get(self, kind: type[R], key: Key) -> R:
        """Read one; `NotFoundError`."""
        ...

    async def list(
        self,
        kind: type[R],
        *,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
        limit: int | None = None,
        continue_token: str = "",
    ) -> Page[R]:
        """Read many, by key order; `GoneError` for a continue token that is too old."""
        ...

    async def create(self, obj: R, *, with_status: bool = False, dry_run: bool = False) -> R:
        """Store a new one; `AlreadyExistsError`, `InvalidError`."""
        ...

    async def update(self, obj: R, *, dry_run: bool = False) -> R:
        """Write metadata and spec by compare-and-swap; `ConflictError`, `NotFoundError`."""
        ...

    async def update_status(self, obj: R, *, dry_run: bool = False) -> R:
        """Write status by compare-and-swap; `ConflictError`, `NotFoundError`."""
        ...

    async def delete(
        self,
        kind: type[R],
        key: Key,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Propagation = Propagation.BACKGROUND,
        dry_run: bool = False,
    ) -> R:
        """Begin (or finish) deletion; preconditions that fail are a `ConflictError`."""
        ...

    def watch(
        self,
        kind: type[R],
        *,
        since: str | None = None,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
    ) -> AsyncGenerator[WatchEvent[R], None]:
        """Stream changes. Close the iterator (`aclosing`) when done."""
        ...

    async def close(self) -> None:
        """Flush and release everything; no call may follow."""
        ...
