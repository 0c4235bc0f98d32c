"""Claims on a store that conflicts, delays, refuses and loses replies."""

import asyncio
import random
from collections import Counter

import pytest

from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import ConflictError, PaddockError, UnavailableError
from paddock.resources.kinds.sandbox import Sandbox
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime

COUNTED = (Dimension.COUNT, QuotaScope.ALL)


class UnreliableStore(MemoryStore):
    """A store whose sandbox writes fail at random, from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(clock=LoopClock())
        self._dice = random.Random(seed)
        self.is_unreliable = False
        self.faults: Counter[str] = Counter()

    async def _chance(self, what, obj):
        if not self.is_unreliable or not isinstance(obj, Sandbox):
            return await what()
        roll = self._dice.random()
        if roll < 0.10:
            self.faults["conflict"] += 1
            raise ConflictError("somebody was first")
        if roll < 0.18:
            self.faults["refused"] += 1
            raise UnavailableError("the store is busy")
        if roll < 0.30:
            self.faults["delay"] += 1
            await asyncio.sleep(self._dice.random())
        done = await what()
        if roll > 0.88:
            self.faults["lost reply"] += 1
            raise UnavailableError("the reply was lost")
        return done

    async def create(self, obj, **options):
        return await self._chance(lambda: super(UnreliableStore, self).create(obj, **options), obj)

    async def update(self, obj, **options):
        return await self._chance(lambda: super(UnreliableStore, self).update(obj, **options), obj)

    async def update_status(self, obj, **options):
        return await self._chance(
            lambda: super(UnreliableStore, self).update_status(obj, **options), obj
        )


@pytest.mark.parametrize("seed", range(12))
async def test_no_sandbox_is_claimed_twice_and_no_quota_exceeded_under_store_faults(
    seed: int,
) -> None:
    store = UnreliableStore(seed)
    async with paddock(pool_size=10, store=store) as world:
        await world.stocked(10)
        limit = QuotaLimit(*COUNTED, 25)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))
        store.is_unreliable = True
        wanted = NewSandbox(template="base", timeout_seconds=None)
        results = await asyncio.gather(
            *(world.manager.claims.create(CALLER, wanted) for _ in range(60)),
            return_exceptions=True,
        )
        store.is_unreliable = False
        given = [item for item in results if isinstance(item, Sandbox)]
        assert all(isinstance(item, (Sandbox, PaddockError)) for item in results)
        assert store.faults
        assert len({item.metadata.uid for item in given}) == len(given)
        page = await store.list(Sandbox)
        claimed = [item for item in page.items if item.spec.claim is not None]
        living = [item for item in claimed if not item.is_deleting]
        assert len(living) <= 25
        # Every returned sandbox is claimed in the store under its own lock.
        locks = {item.metadata.uid: item.spec.claim.lock for item in claimed if item.spec.claim}
        for item in given:
            assert item.spec.claim is not None
            assert locks[item.metadata.uid] == item.spec.claim.lock
        # No other claim stays: what was not returned to a client is cleaned up.
        kept = {item.metadata.uid for item in given}
        async with asyncio.timeout(120):
            while await claimed_in(store) != kept:
                await asyncio.sleep(1)
        await world.until(
            lambda: world.plane.ledger.used("team:default", *COUNTED) == len(given), seconds=60
        )


async def claimed_in(store: UnreliableStore) -> set[str]:
    """Return claimed sandboxes that are not terminating."""
    page = await store.list(Sandbox)
    return {
        item.metadata.uid
        for item in page.items
        if item.spec.claim is not None and not item.is_deleting
    }
