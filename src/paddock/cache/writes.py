"""Writing through the store so that this process never reads anything older afterwards.

`Writer` passes every write on and feeds what came back to the informer of its kind at once.
`mutate` is read, decide, compare-and-swap, and again on conflict.
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
        """Store a new one; `AlreadyExistsError`, `InvalidError`."""
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
        """Delete this very object, never a namesake; with a version: only if that is the newest.

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
        """Apply a pure change to the newest object, as often as it takes.

        `change` gives the object as it should be, or `None` to leave it; it may raise to refuse.
        The first try starts from the cache unless `is_fresh`; later ones from the store. With
        `uid`, a namesake is a `NotFoundError`. Gives the object as it is afterwards.
        """
        obj = None if is_fresh else self._cached(kind, key)
        for attempt in range(1, attempts + 1):
            if obj is None:
                obj = await self._store.get(kind, key)
            if uid is not None and obj.metadata.uid != uid:
                raise NotFoundError(f"{kind.KIND} {key} is no longer the one that was meant")
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

    async def look(self, kind: type[R], key: Key) -> R | None:
        """Read one that the cache may not show yet; `None` where it is not there."""
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
