"""Writes with read-your-writes: after a write, this process never reads an older version.

`Writer` forwards every write to the store and passes the result to the informer of its kind at
once. `mutate` reads, changes, and writes by compare-and-swap; it retries on conflict.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from paddock.engine.informer import Informer
from paddock.kit.backoff import Backoff
from paddock.kit.errors import ConflictError, NotFoundError
from paddock.resources.meta import Key, R
from paddock.store.port import Propagation, Store

_BACKOFF = Backoff(base_seconds=0.005, cap_seconds=0.5, jitter=1.0)


class Writer:
    """The writing half of the Store port, with read-your-writes."""

    def __init__(self, store: Store, informer_of: Callable[[type[Any]], Informer[Any] | None]):
        self._store = store
        self._informer_of = informer_of

    async def create(self, obj: R, *, with_status: bool = False) -> R:
        """Create an object; `AlreadyExistsError`, `InvalidError`."""
        return self._observed(await self._store.create(obj, with_status=with_status))

    async def update(self, obj: R) -> R:
        """Write metadata and spec by compare-and-swap; `ConflictError`, `NotFoundError`."""
        return self._observed(await self._store.update(obj))

    async def update_status(self, obj: R) -> R:
        """Write status by compare-and-swap; `ConflictError`, `NotFoundError`."""
        return self._observed(await self._store.update_status(obj))

    async def delete(
        self,
        obj: R,
        *,
        resource_version: str | None = None,
        propagation: Propagation = Propagation.BACKGROUND,
    ) -> R:
        """Delete the object with this uid; with a version, only if that is the newest.

        `NotFoundError`, `ConflictError`.
        """
        gone = await self._store.delete(
            type(obj),
            obj.key,
            uid=obj.metadata.uid or None,
            resource_version=resource_version,
            propagation=propagation,
        )
        informer = self._informer_of(type(obj))
        if informer is not None:
            if gone.metadata.finalizers:
                informer.observe(gone)
            else:
                informer.observe_deleted(gone)
        return gone

    async def mutate(
        self,
        kind: type[R],
        key: Key,
        change: Callable[[R], R | None],
        *,
        uid: str | None = None,
        is_status: bool = False,
        is_fresh: bool = False,
        attempts: int = 10,
    ) -> R:
        """Apply a pure change to the newest object; retry on conflict.

        `change` returns the new object, or `None` for no change; it may raise to refuse.
        The first try starts from the cache unless `is_fresh`; later ones from the store. With
        `uid`, a recreated object is a `NotFoundError`. Returns the object after the change.
        """
        obj = None if is_fresh else self._cached(kind, key)
        for attempt in range(1, attempts + 1):
            if obj is None:
                obj = await self._store.get(kind, key)
            if uid is not None and obj.metadata.uid != uid:
                raise NotFoundError(f"{kind.KIND} {key} was deleted and recreated (another uid)")
            new = change(obj)
            if new is None or new == obj:
                return obj
            try:
                return await (self.update_status(new) if is_status else self.update(new))
            except ConflictError:
                if attempt == attempts:
                    raise
            obj = None
            if attempt > 1:
                await asyncio.sleep(_BACKOFF.delay(attempt - 1))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def fetch(self, kind: type[R], key: Key) -> R | None:
        """Read an object that the cache may not have yet; `None` if it does not exist."""
        try:
            return self._observed(await self._store.get(kind, key))
        except NotFoundError:
            return None

    def _cached(self, kind: type[R], key: Key) -> R | None:
        informer: Informer[R] | None = self._informer_of(kind)
        return None if informer is None else informer.get(key)

    def _observed(self, obj: R) -> R:
        informer = self._informer_of(type(obj))
        if informer is not None:
            informer.observe(obj)
        return obj
