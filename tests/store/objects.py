"""Objects and helpers of the store tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.builtin import Lease, LeaseSpec
from paddock.resources.kinds.template import (
    SandboxTemplate,
    SandboxTemplateSpec,
    SandboxTemplateStatus,
)
from paddock.resources.meta import Key, ObjectMeta, OwnerReference, Resource, owner_reference
from paddock.store.port import Change, Store, WatchEvent

PATIENCE_SECONDS = 100


def template(ns: str, name: str = "", *, image: str = "base", **meta: Any) -> SandboxTemplate:
    return SandboxTemplate(
        metadata=ObjectMeta(namespace=ns, name=name, **meta),
        spec=SandboxTemplateSpec(image=image),
    )


def lease(ns: str, name: str, holder: str) -> Lease:
    spec = LeaseSpec(
        holder_identity=holder,
        lease_duration_seconds=15,
        renew_time=datetime(2030, 1, 1, tzinfo=UTC),
    )
    return Lease(metadata=ObjectMeta(namespace=ns, name=name), spec=spec)


def with_image(obj: SandboxTemplate, image: str) -> SandboxTemplate:
    return structs.replace(obj, spec=structs.replace(obj.spec, image=image))


def with_revision(obj: SandboxTemplate, revision: str) -> SandboxTemplate:
    return structs.replace(obj, status=SandboxTemplateStatus(revision=revision))


def owned_by(*owners: Resource, blocks: bool = False) -> tuple[OwnerReference, ...]:
    references = (owner_reference(owner, controller=False) for owner in owners)
    return tuple(structs.replace(item, block_owner_deletion=blocks) for item in references)


async def take(stream: AsyncIterator[WatchEvent[Any]], count: int) -> list[WatchEvent[Any]]:
    """Return the next events of a watch without bookmarks."""
    events: list[WatchEvent[Any]] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(events) < count:
            event = await anext(stream)
            if event.change is not Change.BOOKMARK:
                events.append(event)
    return events


async def changes_since(
    store: Store, kind: type[Any], since: str, count: int, **selection: Any
) -> list[tuple[str, str]]:
    """Return change and name of the next events after a version."""
    async with aclosing(store.watch(kind, since=since, **selection)) as stream:
        return [(str(item.change), item.object.key.name) for item in await take(stream, count)]


async def exists(store: Store, kind: type[Any], key: Key) -> bool:
    try:
        await store.get(kind, key)
    except NotFoundError:
        return False
    return True


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the check holds, for example for garbage collection."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await check():
            await asyncio.sleep(0.02)
