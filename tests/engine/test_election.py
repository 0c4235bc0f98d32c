"""Leader election: at most one leader at any time, and a fast takeover."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from paddock.engine.election import Elector, Timing
from paddock.kit.clock import LoopClock
from paddock.kit.errors import UnavailableError
from paddock.kit.tasks import background, cancel_and_wait
from paddock.resources.kinds.builtin import Lease
from paddock.resources.meta import Key, with_meta
from paddock.store.memory import MemoryStore

pytestmark = pytest.mark.looptime

KEY = Key("paddock-system", "controllers")


class Link:
    """The connection of one candidate to the store, which a test can cut or delay."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.calls = Counter[str]()
        self.is_cut = False
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.is_cut:
                raise UnavailableError("cut off")
            await asyncio.sleep(self.seconds)
            result = await getattr(self.store, name)(*args, **kwargs)
            await asyncio.sleep(self.seconds)
            return result

        return call


class Candidate:
    """An elector with its own link and clock, and a record of its leadership."""

    def __init__(self, store: MemoryStore, name: str, year: int = 2030, **timing: float) -> None:
        self.link = Link(store)
        clock = LoopClock(datetime(year, 1, 1, tzinfo=UTC))
        self.elector = Elector(self.link, KEY, name, timing=Timing(**timing), clock=clock)
        self.is_working = False
        self.reigns = 0

    async def lead(self) -> None:
        self.reigns += 1
        self.is_working = True
        try:
            await asyncio.sleep(1_000_000)
        finally:
            self.is_working = False

    async def run(self) -> None:
        await self.elector.run(self.lead)


@pytest.fixture
async def lease_store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore(clock=LoopClock())
    yield store
    await store.close()


async def test_one_candidate_leads_and_the_others_wait(lease_store: MemoryStore) -> None:
    crowd = [Candidate(lease_store, f"c{number}") for number in range(5)]
    tasks = [asyncio.create_task(candidate.run()) for candidate in crowd]
    await asyncio.sleep(120)
    assert [c.is_working for c in crowd].count(True) == 1
    assert sum(c.reigns for c in crowd) == 1
    (leader,) = [c for c in crowd if c.elector.is_leader]
    assert {c.elector.leader for c in crowd} == {leader.elector.identity}
    await cancel_and_wait(*tasks)


async def test_a_leader_renews_with_one_write_and_reads_only_after_a_conflict(
    lease_store: MemoryStore,
) -> None:
    only = Candidate(lease_store, "only")
    async with background(only.run(), name="only"):
        await asyncio.sleep(10)
        only.link.calls.clear()
        await asyncio.sleep(120)
        assert only.link.calls["update"] > 30
        assert only.link.calls["get"] == 0
        lease = await lease_store.get(Lease, KEY)
        await lease_store.update(with_meta(lease, annotations={"note": "looked at"}))
        await asyncio.sleep(30)
        assert only.link.calls["get"] == 1
        assert (await lease_store.get(Lease, KEY)).metadata.annotations == {"note": "looked at"}
    assert only.reigns == 1


async def test_a_leader_that_stops_releases_the_lease(
    lease_store: MemoryStore,
) -> None:
    first, second = Candidate(lease_store, "first"), Candidate(lease_store, "second")
    async with background(first.run(), name="first"):
        await asyncio.sleep(10)
        following = asyncio.create_task(second.run())
        await asyncio.sleep(10)
        assert first.is_working
        assert not second.is_working
    assert not first.elector.is_leader
    await asyncio.sleep(3)
    assert second.is_working
    assert second.elector.term > first.elector.term
    await cancel_and_wait(following)


async def test_a_lease_is_released_on_a_slow_store(lease_store: MemoryStore) -> None:
    first = Candidate(lease_store, "first")
    async with background(first.run(), name="first"):
        await asyncio.sleep(10)
        first.link.seconds = 2.2
    assert not (await lease_store.get(Lease, KEY)).spec.holder_identity


async def test_a_lease_is_released_during_a_renewal(lease_store: MemoryStore) -> None:
    first = Candidate(lease_store, "first")
    async with background(first.run(), name="first"):
        await asyncio.sleep(10)
        first.link.seconds = 0.5
        before = await lease_store.get(Lease, KEY)
        # The write is done, but its response is pending.
        while await lease_store.get(Lease, KEY) == before:
            await asyncio.sleep(0.1)
    assert not (await lease_store.get(Lease, KEY)).spec.holder_identity


@pytest.mark.parametrize("lived", [10.0, 11.3, 12.9, 14.2])
async def test_a_leader_that_crashes_is_replaced_when_its_lease_expires(
    lease_store: MemoryStore, lived: float
) -> None:
    timing = Timing(lease_seconds=15, renew_seconds=10, retry_seconds=2)
    first, second = Candidate(lease_store, "first"), Candidate(lease_store, "second")
    one = asyncio.create_task(first.run())
    await asyncio.sleep(1)
    two = asyncio.create_task(second.run())
    await asyncio.sleep(lived)
    first.link.is_cut = True
    last = (await lease_store.get(Lease, KEY)).spec
    assert (last.holder_identity, last.renew_time is not None) == ("first", True)
    await asyncio.sleep(timing.lease_seconds * 2)
    next_one = (await lease_store.get(Lease, KEY)).spec
    assert next_one.holder_identity == "second"
    waited = (next_one.acquire_time - last.renew_time).total_seconds()
    # Not before the lease expired, measured from the moment its last renewal was seen.
    assert timing.lease_seconds <= waited <= timing.lease_seconds + 1.2 * timing.retry_seconds + 0.1
    await cancel_and_wait(one, two)


async def test_a_partitioned_leader_stops_before_another_starts(
    lease_store: MemoryStore,
) -> None:
    first, second = Candidate(lease_store, "first"), Candidate(lease_store, "second")
    one = asyncio.create_task(first.run())
    await asyncio.sleep(5)
    two = asyncio.create_task(second.run())
    await asyncio.sleep(5)
    first.link.is_cut = True
    stopped = began = None
    for tick in range(4000):
        await asyncio.sleep(0.01)
        if stopped is None and not first.is_working:
            stopped = tick
        if began is None and second.is_working:
            began = tick
    assert stopped is not None
    assert began is not None
    assert stopped < began
    first.link.is_cut = False
    await asyncio.sleep(60)
    assert second.is_working
    assert not first.is_working, "it follows now"
    await cancel_and_wait(one, two)


async def test_clock_skew_of_years_is_harmless(lease_store: MemoryStore) -> None:
    ahead = Candidate(lease_store, "ahead", year=2040)
    behind = Candidate(lease_store, "behind", year=2020)
    for first, second in ((ahead, behind), (behind, ahead)):
        leading = asyncio.create_task(first.run())
        await asyncio.sleep(5)
        following = asyncio.create_task(second.run())
        await asyncio.sleep(120)
        assert first.is_working
        assert not second.is_working
        await cancel_and_wait(following, leading)


async def test_an_abandoned_lease_is_acquired_after_its_duration_and_not_before(
    lease_store: MemoryStore,
) -> None:
    dead, heir = Candidate(lease_store, "dead"), Candidate(lease_store, "heir")
    task = asyncio.create_task(dead.run())
    await asyncio.sleep(1)
    dead.link.is_cut = True
    await cancel_and_wait(task)
    assert (await lease_store.get(Lease, KEY)).spec.holder_identity == "dead"
    began = asyncio.get_running_loop().time()
    following = asyncio.create_task(heir.run())
    while not heir.is_working:
        await asyncio.sleep(0.1)
    waited = asyncio.get_running_loop().time() - began
    assert 15 <= waited <= 18
    await cancel_and_wait(following)


async def test_work_that_returns_or_fails_releases_the_lease(
    lease_store: MemoryStore,
) -> None:
    async def fails() -> None:
        raise ValueError("broken work")

    async def ends() -> None:
        pass

    elector = Elector(lease_store, KEY, "worker", clock=LoopClock())
    with pytest.raises(ValueError, match="broken work"):
        await elector.run(fails)
    assert (await lease_store.get(Lease, KEY)).spec.holder_identity == ""
    await elector.run(ends)
    assert not elector.is_leader


async def test_every_change_of_leader_has_a_new_term_even_after_a_restart(
    lease_store: MemoryStore,
) -> None:
    terms: list[int] = []
    for name in ("a", "a", "b"):
        candidate = Candidate(lease_store, name)
        async with background(candidate.run(), name="candidate"):
            await asyncio.sleep(60)
            terms.append(candidate.elector.term)
    assert terms == sorted(set(terms)), "each greater than the one before"


async def test_a_leader_on_a_slow_store_does_not_outlive_its_lease(
    lease_store: MemoryStore,
) -> None:
    first = Candidate(lease_store, "first")
    task = asyncio.create_task(first.run())
    await asyncio.sleep(5)
    assert first.is_working
    first.link.seconds = 60
    began = asyncio.get_running_loop().time()
    while first.is_working:
        await asyncio.sleep(0.1)
    assert asyncio.get_running_loop().time() - began <= 10.5
    await cancel_and_wait(task)


async def test_a_term_counts_from_before_the_write_that_acquired_the_lease(
    lease_store: MemoryStore, looptime: Any
) -> None:
    slow = Candidate(lease_store, "slow")
    slow.link.seconds = 0.4
    task = asyncio.create_task(slow.run())
    while not slow.is_working:
        await asyncio.sleep(0.1)
    assert looptime > 1, "reading and writing took their time"
    slow.link.is_cut = True
    await asyncio.sleep(9.9 - asyncio.get_running_loop().time())
    assert slow.elector.is_leader
    await asyncio.sleep(0.2)
    assert not slow.elector.is_leader
    await cancel_and_wait(task)


def test_unsafe_timing_is_rejected() -> None:
    with pytest.raises(ValueError, match="retry < renew < lease"):
        Timing(lease_seconds=10, renew_seconds=10)


@pytest.mark.parametrize("seed", range(4))
async def test_there_are_never_two_leaders_under_random_partitions_and_delays(
    lease_store: MemoryStore, seed: int
) -> None:
    chance = random.Random(seed)
    crowd = [
        Candidate(lease_store, f"c{number}", year=2020 + 5 * number, retry_seconds=0.5)
        for number in range(3)
    ]
    tasks = [asyncio.create_task(candidate.run()) for candidate in crowd]
    for _ in range(1500):
        await asyncio.sleep(0.1)
        working = [c for c in crowd if c.is_working]
        assert len(working) <= 1
        assert len([c for c in crowd if c.elector.is_leader]) <= 1
        if chance.random() < 0.03:
            victim = chance.choice(crowd)
            victim.link.is_cut = chance.random() < 0.5
            victim.link.seconds = chance.choice((0.0, 0.0, 0.4, 3.0))
    for candidate in crowd:
        candidate.link.is_cut, candidate.link.seconds = False, 0.0
    await asyncio.sleep(60)
    assert [c.is_working for c in crowd].count(True) == 1
    await cancel_and_wait(*tasks)
