"""The Store port: durable resources with the semantics of Kubernetes.

Objects are frozen and may be shared. Every write returns the object as stored.

- `create` fills uid, resourceVersion, generation 1, creationTimestamp and, from `generateName`,
  the name. `status` of a new object is empty, as it is a subresource, unless
  `with_status=True`.
- `update` writes metadata and spec and keeps status; `update_status` writes status and keeps the
  rest. Both require the version that was read in `metadata.resourceVersion`: a stale version is a
  `ConflictError`, an empty one an `InvalidError`. Generation increases only when the spec changes.
  A write that changes nothing returns the stored object and creates no watch event.
- The store sets the identity (uid, creationTimestamp, deletionTimestamp, generation, namespace,
  name). Values from the writer are ignored, except that a different uid is a `ConflictError`.
- An object that violates a rule of its kind is an `InvalidError` that names every field; a write
  that is not possible now is an `UnavailableError`. In both cases nothing is stored. `dry_run`
  runs all checks, returns what the write would return, and stores nothing.
- `delete` of an object with finalizers sets deletionTimestamp; the object is removed with its last
  finalizer, and no finalizer can be added meanwhile. (On a cluster, the start of deletion
  increases the generation; in embedded stores it does not.) `Background` collects dependents
  afterwards, `Foreground` before, `Orphan` removes their owner references. A dependent whose
  owners (by uid) are all gone is collected.
- Versions are one increasing sequence over all kinds of a store.
- `list` returns a consistent page and the version to watch from. `watch` replays every change
  after `since` in order, then streams new ones; `GoneError` means that `since` is no longer in the
  history and the caller must list again. Without `since` it starts with the existing objects as
  ADDED. With selectors, objects that start to match are ADDED and those that stop are DELETED.
  DELETED carries the last stored object, at the version of its deletion. A BOOKMARK may be sent at
  any time.
- Read your writes: after a write has returned, no read or list of this store is older.
"""

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Generic, Protocol

from msgspec import Struct

from paddock.resources.meta import Key, R
from paddock.resources.selectors import FieldSelector, LabelSelector


class Propagation(StrEnum):
    """How a deletion treats dependents."""

    BACKGROUND = "Background"
    FOREGROUND = "Foreground"
    ORPHAN = "Orphan"


class Change(StrEnum):
    """The type of a watch event."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """No change; `version` is the version up to which all events were sent."""


class WatchEvent(Struct, Generic[R], frozen=True):
    """One change, with the object after it (for DELETED: as last stored)."""

    change: Change
    object: R | None
    version: str


class Page(Struct, Generic[R], frozen=True):
    """One page of a list."""

    items: tuple[R, ...]
    version: str
    """The version to watch from; the same on every page of one list."""
    continue_token: str = ""
    """Empty on the last page."""
    remaining: int | None = None


class Store(Protocol):
    """Stores resources durably."""

    async def get(self, kind: type[R], key: Key) -> R:
        """Return one object; `NotFoundError`."""
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
        """Return objects in key order; `GoneError` if the continue token is too old."""
        ...

    async def create(self, obj: R, *, with_status: bool = False, dry_run: bool = False) -> R:
        """Store a new object; `AlreadyExistsError`, `InvalidError`."""
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
        """Mark or remove an object; a failed precondition is a `ConflictError`."""
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
        """Flush writes and release all resources; no call may follow."""
        ...
