"""The allocator under any order of events and restarts: no double allocation, no excess."""

import asyncio
import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.controllers.batch.allocation.plan import ALGORITHMS, BatchDemand, PoolStock, plan
from paddock.kit.clock import LoopClock
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import RecycleStrategy, RecycleType
from paddock.resources.meta import Key
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.controllers.batch.make import Batches, batch, pool
from tests.scenario.paddock import CALLER, paddock

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@st.composite
def demands(draw) -> tuple[BatchDemand, ...]:
    found = []
    for number in range(draw(st.integers(0, 12))):
        missing = draw(st.integers(0, 20))
        found.append(
            BatchDemand(
                key=Key("n", f"b{number}"),
                tenant=draw(st.sampled_from("abc")),
                since=NOW - timedelta(seconds=draw(st.integers(0, 1000))),
                missing=missing,
                held=draw(st.integers(0, 5)),
                priority=draw(st.integers(-3, 3)),
                at_once=draw(st.integers(0, missing)),
            )
        )
    return tuple(found)


@given(demands(), st.integers(0, 60), st.integers(0, 40), st.integers(0, 60), st.data())
@settings(deadline=None)
def test_no_batch_gets_more_than_it_needs_and_all_together_no_more_than_the_stock(
    waiting, ready, allocated, ceiling, data
) -> None:
    stock = PoolStock(ready=ready, allocated=allocated, ceiling=ceiling)
    algorithm = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    decision = plan(waiting, stock, algorithm=algorithm, now=NOW)
    wanted = {item.key: item for item in waiting}
    assert sum(decision.grants.values()) <= min(ready, max(ceiling - allocated, 0))
    for key, count in decision.grants.items():
        assert 0 < count <= wanted[key].missing
        assert count >= wanted[key].at_once
    assert decision.unmet >= 0


@given(demands(), st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 4), st.integers(20, 40))
@settings(max_examples=60, deadline=None)
def test_every_satisfiable_batch_is_served_eventually(waiting, algorithm, supply, ceiling) -> None:
    """Sandboxes arrive in small numbers while younger, more important batches keep arriving."""
    now = NOW
    left = {item.key: item for item in waiting if item.missing}
    impatient = 0
    ready = 0
    rounds = 0
    while any(key.name.startswith("b") for key in left):
        rounds += 1
        assert rounds < 3000, left
        now += timedelta(seconds=30)
        ready = min(ready + supply, ceiling)
        impatient += 1
        rival = Key("n", f"rival{impatient}")
        left[rival] = BatchDemand(key=rival, tenant="z", since=now, missing=supply, priority=3)
        stock = PoolStock(ready=ready, ceiling=ceiling)
        decision = plan(tuple(left.values()), stock, algorithm=algorithm, now=now)
        for key in decision.unsatisfiable:
            left.pop(key, None)
        for key, count in decision.grants.items():
            ready -= count
            item = left.pop(key)
            if item.missing > count:
                rest = structs.replace(item, missing=item.missing - count)
                rest = structs.replace(
                    rest, held=item.held + count, at_once=max(item.at_once - count, 0)
                )
                # What it holds is released at once in this model: only its demand counts.
                left[key] = structs.replace(rest, held=0)


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("algorithm", ["packed", "spread"])
async def test_random_operations_never_share_a_sandbox_or_exceed_a_pool(
    seed: int, algorithm: str
) -> None:
    dice = random.Random(seed)
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock, jitter=0.5, seed=seed)
    most = dice.randint(6, 12)
    names: list[str] = []
    for life in range(3):
        async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
            batches = Batches(world)
            watcher = _Watcher(world, most)
            if life == 0:
                strategy = RecycleStrategy(type=dice.choice(list(RecycleType)))
                await batches.create(
                    pool(
                        "p",
                        buffer=dice.randint(0, 3),
                        most=most,
                        recycle_strategy=strategy,
                        algorithm=algorithm,
                    )
                )
            for step in range(12):
                await _random_operation(world, batches, dice, names, f"b{life}-{step}", most)
                await asyncio.sleep(dice.random() * 3)
                watcher.look()
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        batches = Batches(world)
        watcher = _Watcher(world, most)
        # In the end all are served, one by one; where several hold part of what they need
        # and the pool is full, one of them is deleted.
        while alive := [name for name in names if not batches.is_gone(name)]:
            for _ in range(120):
                content = [name for name in alive if _is_satisfied(batches.get(name))]
                if content:
                    break
                await asyncio.sleep(1)
            else:
                held = sum(len(batches.held(name)) for name in alive)
                assert held + len(watcher.claimed()) == most, "there was room, but nobody got it"
                content = [max(alive, key=lambda name: len(batches.held(name)))]
                assert len(alive) > 1
            await batches.delete(content[0])
            watcher.look()
        await world.until(lambda: batches.allocated("p") == len(watcher.claimed()), seconds=300)


def _is_satisfied(found: BatchSandbox) -> bool:
    return found.status.ready == found.spec.replicas


async def _random_operation(
    world, batches: Batches, dice, names: list[str], name: str, most: int
) -> None:
    alive = [item for item in names if not batches.is_gone(item)]
    roll = dice.random()
    if roll < 0.45 or not alive:
        size = dice.randint(1, most // 2)
        more = {"min_available": size} if dice.random() < 0.3 else {}
        await batches.create(batch(name, size, pool_ref="p", priority=dice.randint(0, 3), **more))
        names.append(name)
    elif roll < 0.6:
        await batches.write.delete(batches.get(dice.choice(alive)))
    elif roll < 0.75:
        chosen = dice.choice(alive)
        if not batches.get(chosen).is_deleting:
            await batches.change(chosen, replicas=dice.randint(1, most // 2), min_available=None)
    elif roll < 0.9:
        held = [uid for item in alive for uid in batches.held(item).values()]
        if held and await world.runtime.inspect(uid := dice.choice(held)) is not None:
            world.runtime.crash(uid)
    else:
        wanted = NewSandbox(template="p", timeout_seconds=20, create_on_no_stock=False)
        await asyncio.gather(world.manager.claims.create(CALLER, wanted), return_exceptions=True)


class _Watcher:
    """Checks the invariants after every change of a batch or a pool."""

    def __init__(self, world, most: int) -> None:
        self.world = world
        self.most = most
        world.provider.informer(BatchSandbox).subscribe(lambda old, new: self.look())
        world.plane.pool_members.on_change(lambda key: self.look())

    def claimed(self) -> set[str]:
        found = self.world.provider.sandboxes("default")
        return {item.metadata.uid for item in found if "paddock.dev/pool" in item.metadata.labels}

    def look(self) -> None:
        owners: dict[str, str] = {}
        for found in self.world.provider.all(BatchSandbox):
            for item in found.status.allocations:
                if item.sandbox:
                    assert owners.setdefault(item.uid, found.metadata.name) == found.metadata.name
        assert not self.claimed() & owners.keys()
        members = self.world.plane.pool_members.members(Key("default", "p"))
        living = (members.creating, members.available, members.reserved, members.allocated)
        assert sum(map(len, living)) <= self.most
