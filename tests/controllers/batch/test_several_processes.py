"""Several processes that claim from the same pools, and a store that loses replies."""

import asyncio
import random

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import UnavailableError
from paddock.resources.kinds.batch import BatchPhase, BatchSandbox
from paddock.resources.meta import Key
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.controllers.batch.make import Batches, batch, pool, task
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime


async def test_claims_of_another_process_and_batches_never_share_a_sandbox() -> None:
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock)
    shared = {"store": store, "runtime": runtime, "clock": clock}
    async with paddock(pool_size=0, **shared) as leader, paddock(pool_size=0, **shared) as replica:
        # Two control planes on one store: they share nothing but the store.
        for world in (leader, replica):
            world.plane.batches.controller._is_sole_writer = False
        batches = Batches(leader)
        await batches.create(pool("p", buffer=8, most=40))
        await leader.stocked(8, "p")
        await replica.stocked(8, "p")
        await batches.create(*(batch(f"b{n}", 3, pool_ref="p") for n in range(3)))
        claims = [replica.manager.claims.create(CALLER, NewSandbox(template="p")) for _ in range(8)]
        made = await asyncio.gather(*claims)
        for n in range(3):
            await batches.ready(f"b{n}")
        await asyncio.sleep(30)
        held = [uid for n in range(3) for uid in batches.held(f"b{n}").values()]
        claimed = [item.metadata.uid for item in made]
        assert len({*held, *claimed}) == len(held) + len(claimed) == 17
        for n in range(3):
            for item in batches.get(f"b{n}").status.allocations:
                sandbox = leader.provider.sandbox(Key("default", item.sandbox))
                assert sandbox is not None
                assert sandbox.spec.claim is not None
                assert sandbox.spec.claim.sandbox_id == item.sandbox_id


class LossyStore(MemoryStore):
    """A store that sometimes loses replies of batch writes, or refuses them."""

    def __init__(self, seed: int) -> None:
        super().__init__(clock=LoopClock())
        self._dice = random.Random(seed)
        self.lost = 0
        """Number of lost replies; the first reply is always lost."""

    async def update_status(self, obj, **options):
        if not isinstance(obj, BatchSandbox):
            return await super().update_status(obj, **options)
        roll = self._dice.random()
        if roll < 0.2:
            raise UnavailableError("the store is busy")
        written = await super().update_status(obj, **options)
        if roll < 0.5 or not self.lost:
            self.lost += 1
            raise UnavailableError("the reply was lost")
        return written


@pytest.mark.parametrize("seed", range(4))
async def test_a_lost_reply_never_allocates_a_sandbox_twice(seed: int) -> None:
    store = LossyStore(seed)
    async with paddock(pool_size=0, store=store) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=2, most=12))
        names = [f"b{n}" for n in range(4)]
        await batches.create(*(batch(name, 3, pool_ref="p") for name in names))
        claims = [
            world.manager.claims.create(CALLER, NewSandbox(template="p", claim_timeout_seconds=300))
            for _ in range(4)
        ]
        made = await asyncio.gather(*claims)
        await world.until(
            lambda: all(batches.get(name).status.phase is BatchPhase.RUNNING for name in names),
            seconds=600,
        )
        held = [uid for name in names for uid in batches.held(name).values()]
        claimed = {item.metadata.uid for item in made}
        assert len(held) == len(set(held)) == 12
        assert not claimed & set(held)
        assert store.lost


async def test_tasks_start_only_in_sandboxes_with_a_written_claim() -> None:
    async with paddock(pool_size=0) as world:
        world.plane.batches.controller._is_sole_writer = False
        batches = Batches(world)
        await batches.create(pool("p", buffer=0, most=5))
        await batches.create(batch("b", 3, pool_ref="p", task_template=task("true")))
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.COMPLETED)
        for item in batches.get("b").status.allocations:
            sandbox = world.provider.sandbox(Key("default", item.sandbox))
            assert sandbox is not None
            assert sandbox.spec.claim is not None
