"""A store that notifies the other API replicas of each write before the write returns.

Discovery of replicas and the connections to them are in `adapters/replicas.py`.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from paddock.resources import registry
from paddock.resources.meta import Key, R, Resource
from paddock.resources.selectors import FieldSelector, LabelSelector
from paddock.store.port import Page, Propagation, Store, WatchEvent


class ReplicaNotifier(Protocol):
    """Sends changed objects to the other replicas."""

    async def notify(self, obj: Resource, *, is_gone: bool) -> None:
        """Return when every other replica has confirmed or timed out."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class ReplicatedStore:
    """Wraps a store; reads pass through, writes notify the other replicas."""

    def __init__(self, store: Store, replicas: ReplicaNotifier) -> None:
        self._store = store
        self._replicas = replicas

    async def get(self, kind: type[R], key: Key) -> R:
        return await self._store.get(kind, key)

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
        return await self._store.list(
            kind,
            namespace=namespace,
            labels=labels,
            fields=fields,
            limit=limit,
            continue_token=continue_token,
        )

    async def create(self, obj: R, *, with_status: bool = False, dry_run: bool = False) -> R:
        created = await self._store.create(obj, with_status=with_status, dry_run=dry_run)
        return await self._notified(created, dry_run=dry_run)

    async def update(self, obj: R, *, dry_run: bool = False) -> R:
        return await self._notified(await self._store.update(obj, dry_run=dry_run), dry_run=dry_run)

    async def update_status(self, obj: R, *, dry_run: bool = False) -> R:
        written = await self._store.update_status(obj, dry_run=dry_run)
        return await self._notified(written, dry_run=dry_run)

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
        deleted = await self._store.delete(
            kind,
            key,
            uid=uid,
            resource_version=resource_version,
            propagation=propagation,
            dry_run=dry_run,
        )
        if not dry_run:
            await self._replicas.notify(deleted, is_gone=not deleted.metadata.finalizers)
        return deleted

    async def _notified(self, obj: R, *, dry_run: bool) -> R:
        if not dry_run and obj.KIND in registry.BY_KIND:
            await self._replicas.notify(obj, is_gone=False)
        return obj

    def watch(
        self,
        kind: type[R],
        *,
        since: str | None = None,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
    ) -> AsyncGenerator[WatchEvent[R], None]:
        return self._store.watch(
            kind, since=since, namespace=namespace, labels=labels, fields=fields
        )

    async def close(self) -> None:
        await self._replicas.close()
        await self._store.close()


_: type[Store] = ReplicatedStore
