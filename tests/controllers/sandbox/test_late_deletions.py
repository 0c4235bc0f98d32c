"""A delete applies to the version that was read: a later write by another wins."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit import ids
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox
from paddock.resources.meta import Key
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime

Word = Callable[[Sandbox], Sandbox]


class OvertakenStore(MemoryStore):
    """Writes to a sandbox right before it is deleted, once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.word: Word | None = None
        self.overtaken: list[str] = []

    async def delete(self, kind: Any, key: Key, **options: Any) -> Any:
        if kind is Sandbox and self.word is not None:
            current = await self.get(Sandbox, key)
            if current.metadata.uid not in self.overtaken:
                self.overtaken.append(current.metadata.uid)
                await self.update(self.word(current))
        return await super().delete(kind, key, **options)


async def test_an_extension_just_before_the_deadline_keeps_the_sandbox() -> None:
    store = OvertakenStore()
    async with paddock(store=store) as world:

        def extended(sandbox: Sandbox) -> Sandbox:
            end = world.plane.clock.now() + timedelta(seconds=600)
            return structs.replace(sandbox, spec=structs.replace(sandbox.spec, shutdown_time=end))

        made = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=60)
        )
        store.word = extended
        await asyncio.sleep(120)
        assert store.overtaken == [made.metadata.uid]
        assert not (await store.get(Sandbox, made.key)).is_deleting


async def test_a_sandbox_that_is_claimed_while_its_pool_shrinks_stays() -> None:
    store = OvertakenStore()
    async with paddock(pool_size=3, store=store) as world:
        await world.stocked(3)

        def taken(sandbox: Sandbox) -> Sandbox:
            claim = ClaimIdentity(
                sandbox_id=ids.sandbox_id(),
                owner="default",
                lock=ids.uid(),
                claim_time=world.plane.clock.now(),
            )
            spec = structs.replace(sandbox.spec, claim=claim)
            meta = structs.replace(sandbox.metadata, owner_references=())
            return structs.replace(sandbox, spec=spec, metadata=meta)

        store.word = taken
        await world.provider.write.mutate(
            SandboxPool,
            world.pool().key,
            lambda pool: structs.replace(pool, spec=structs.replace(pool.spec, replicas=0)),
        )
        await asyncio.sleep(60)
        assert len(store.overtaken) == 3
        left = (await store.list(Sandbox)).items
        assert {item.metadata.uid for item in left if not item.is_deleting} == set(store.overtaken)
