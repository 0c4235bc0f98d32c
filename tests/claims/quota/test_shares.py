"""Quotas and idempotency keys with several control planes on one store.

Virtual time, one store in memory with delays, and one cache per control plane.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from paddock.app.roles.control_plane import ControlPlane
from paddock.app.wiring import default_resources
from paddock.claims import idempotency
from paddock.claims.caller import LABEL_KIND
from paddock.claims.idempotency import KIND_IDEMPOTENCY_KEY
from paddock.claims.quota import share_store
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import ConflictError, NotFoundError, PaddockError, QuotaExceededError
from paddock.kit.tasks import background
from paddock.resources.kinds.builtin import Lease
from paddock.resources.kinds.sandbox import Sandbox
from paddock.runtime.simulated import Operation, SimulatedRuntime
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from paddock.store.port import Change
from tests.scenario.paddock import CALLER, SECRETS

pytestmark = [pytest.mark.looptime, pytest.mark.timeout(120)]

WANTED = NewSandbox(template="base", timeout_seconds=None)


class SlowStore(MemoryStore):
    """A store with delays before and after each write, and late watch events."""

    def __init__(self, seed: int) -> None:
        super().__init__(clock=LoopClock())
        self._dice = random.Random(seed)
        self.written: dict[str, int] = {}
        self.is_slow = False

    async def _slowly(self, obj, what):
        self.written[type(obj).KIND] = self.written.get(type(obj).KIND, 0) + 1
        if self.is_slow:
            await asyncio.sleep(self._dice.random() * 0.05)
        done = await what()
        if self.is_slow:
            await asyncio.sleep(self._dice.random() * 0.05)
        return done

    async def create(self, obj, **options):
        return await self._slowly(obj, lambda: super(SlowStore, self).create(obj, **options))

    async def update(self, obj, **options):
        return await self._slowly(obj, lambda: super(SlowStore, self).update(obj, **options))

    async def watch(self, kind, **options):
        async with aclosing(super().watch(kind, **options)) as events:
            async for event in events:
                if self.is_slow:
                    await asyncio.sleep(self._dice.random() * 0.01)
                yield event


class Plane:
    """One control plane, which can be killed without a shutdown."""

    def __init__(self, store: MemoryStore, runtime: SimulatedRuntime, *, leads: bool) -> None:
        clock = LoopClock()
        self.control = ControlPlane(
            Settings(pool_size=0, cold_creates_per_second=1000),
            SECRETS,
            store=store,
            runtime=runtime,
            clock=clock,
            is_sole_writer=False,
        )
        self.manager = self.control.manager
        self._leads = leads
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        control = self.control
        await self._stack.enter_async_context(control.provider.run())
        if self._leads:
            await default_resources.ensure(
                control.store, control.keyring, control.settings, SECRETS.api_key
            )
        assert control.shares is not None
        work = control.work() if self._leads else {"quota shares": control.shares.run()}
        for name, part in work.items():
            await self._stack.enter_async_context(background(part, name=name))

    async def kill(self) -> None:
        await self._stack.aclose()

    async def stop(self) -> None:
        assert self.control.shares is not None
        await self.control.shares.leave()
        await self._stack.aclose()


class Planes:
    """Several control planes on one store, and the observed number of a team's sandboxes."""

    def __init__(self, seed: int) -> None:
        self.store = SlowStore(seed)
        self.runtime = SimulatedRuntime(clock=LoopClock())
        self.all: list[Plane] = []
        self.most = 0
        self.most_running = 0
        self.now = 0
        self._claimed: dict[str, bool] = {}

    async def add(self) -> Plane:
        plane = Plane(self.store, self.runtime, leads=not self.all)
        await plane.start()
        self.all.append(plane)
        return plane

    async def follow(self) -> None:
        """Count the claimed sandboxes at every version of the store."""
        async with aclosing(MemoryStore.watch(self.store, Sandbox)) as events:
            async for event in events:
                obj = event.object
                if obj is None:
                    continue
                self._claimed.pop(obj.metadata.uid, None)
                is_gone = event.change is Change.DELETED or obj.is_deleting
                if not is_gone and obj.spec.claim is not None:
                    self._claimed[obj.metadata.uid] = not obj.spec.paused
                self.now = len(self._claimed)
                self.most = max(self.most, self.now)
                self.most_running = max(self.most_running, sum(self._claimed.values()))

    async def quota(self, *limits: QuotaLimit) -> None:
        await self.all[0].control.keyring.set_team_quota("default", Quota(limits))
        for plane in self.all:
            while plane.control.keyring.team("default").quota != Quota(limits):
                await asyncio.sleep(0.01)

    async def reaches(self, count: int, *, seconds: float = 30) -> None:
        """Claim on all control planes until so many sandboxes are claimed."""
        async with asyncio.timeout(seconds):
            while self.now < count:
                for plane in self.all:
                    with contextlib.suppress(QuotaExceededError):
                        await plane.manager.claims.create(CALLER, WANTED)
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def planes(count: int, seed: int = 0) -> AsyncGenerator[Planes]:
    world = Planes(seed)
    try:
        for _ in range(count):
            await world.add()
        async with background(world.follow(), name="audit"):
            yield world
    finally:
        for plane in world.all:
            await plane.kill()


def count(limit: int, scope: QuotaScope = QuotaScope.ALL) -> QuotaLimit:
    return QuotaLimit(Dimension.COUNT, scope, limit)


def id_of(sandbox: Sandbox) -> str:
    assert sandbox.spec.claim is not None
    return sandbox.spec.claim.sandbox_id


@pytest.mark.parametrize("seed", range(6))
async def test_concurrent_claims_on_several_control_planes_use_a_quota_fully_and_never_exceed_it(
    seed: int,
) -> None:
    dice = random.Random(seed)
    limit = dice.choice((1, 3, 10, 40))
    async with planes(3, seed) as world:
        await world.quota(count(limit), count(max(limit - 2, 1), QuotaScope.RUNNING))
        world.store.is_slow = True

        async def client(number: int) -> None:
            mine: list[str] = []
            for _ in range(6):
                await asyncio.sleep(dice.random())
                manager = dice.choice(world.all).manager
                try:
                    if mine and dice.random() < 0.3:
                        await manager.lifecycle.kill(CALLER, mine.pop())
                    elif mine and dice.random() < 0.4:
                        await manager.lifecycle.pause(CALLER, mine[-1])
                        await dice.choice(world.all).manager.lifecycle.connect(
                            CALLER, mine[-1], timeout_seconds=600
                        )
                    else:
                        mine.append(id_of(await manager.claims.create(CALLER, WANTED)))
                except (QuotaExceededError, ConflictError, NotFoundError):
                    # The quota is used up, or another replica's cache is behind.
                    continue

        await asyncio.gather(*(client(number) for number in range(25)))
        assert world.most <= limit
        assert world.most_running <= max(limit - 2, 1)
        world.store.is_slow = False
        await world.quota(count(limit))
        await world.reaches(limit)
        assert world.most == limit


async def test_a_distant_quota_costs_few_writes_and_no_quota_costs_none() -> None:
    async with planes(2) as world:
        store, (one, other) = world.store, world.all
        before = store.written.get("Lease", 0)
        await asyncio.gather(*(one.manager.claims.create(CALLER, WANTED) for _ in range(50)))
        assert store.written.get("Lease", 0) == before
        await world.quota(count(2000))
        await asyncio.gather(
            *(
                plane.manager.claims.create(CALLER, WANTED)
                for _ in range(100)
                for plane in (one, other)
            )
        )
        assert store.written["Lease"] - before <= 20


async def test_one_control_plane_can_use_the_unused_share_of_another() -> None:
    async with planes(2) as world:
        one, other = world.all
        await world.quota(count(8))
        made = [await one.manager.claims.create(CALLER, WANTED) for _ in range(8)]
        with pytest.raises(QuotaExceededError):
            await other.manager.claims.create(CALLER, WANTED)
        for sandbox in made[:3]:
            await one.manager.lifecycle.kill(CALLER, id_of(sandbox))
        async with asyncio.timeout(10):
            while world.now > 5:
                await asyncio.sleep(0.01)
        # Each at the first attempt: a claim waits for shares that are being returned.
        await asyncio.gather(*(other.manager.claims.create(CALLER, WANTED) for _ in range(3)))
        assert world.now == world.most == 8


async def test_the_place_of_a_killed_sandbox_is_free_while_its_processes_still_end() -> None:
    async with planes(2) as world:
        one, other = world.all
        world.runtime.set_latency(Operation.DESTROY, 60)
        await world.quota(count(1))
        made = await one.manager.claims.create(CALLER, WANTED)
        for killer in (one, other, one):
            await killer.manager.lifecycle.kill(CALLER, id_of(made))
            # Kills of another's sandbox too: its claim waits until the place is given back.
            made = await killer.manager.claims.create(CALLER, WANTED)
        assert world.now == world.most == 1


async def test_the_share_of_a_control_plane_that_stops_is_free_at_once() -> None:
    async with planes(3) as world:
        one, other, third = world.all
        await world.quota(count(100))
        sandbox = await third.manager.claims.create(CALLER, WANTED)
        await third.stop()
        world.all.remove(third)
        await world.reaches(100, seconds=60)
        # Its sandboxes count as long as they exist, and no longer.
        with pytest.raises(QuotaExceededError):
            await one.manager.claims.create(CALLER, WANTED)
        await one.manager.lifecycle.kill(CALLER, id_of(sandbox))
        async with asyncio.timeout(10):
            while world.now == 100:
                await asyncio.sleep(0.01)
        await other.manager.claims.create(CALLER, WANTED)
        assert world.most == 100


async def test_the_share_of_a_dead_control_plane_is_free_after_its_timeout_and_not_before() -> None:
    async with planes(2) as world:
        one, other = world.all
        await world.quota(count(8))
        await other.manager.claims.create(CALLER, WANTED)
        share = 2
        await other.kill()
        world.all.remove(other)
        began = asyncio.get_running_loop().time()
        await world.reaches(8 - share + 1)
        with pytest.raises(QuotaExceededError):
            await one.manager.claims.create(CALLER, WANTED)
        await world.reaches(8, seconds=share_store.EXPIRY_SECONDS + 30)
        assert asyncio.get_running_loop().time() - began >= share_store.EXPIRY_SECONDS - 20
        assert world.most == 8


async def test_a_delayed_control_plane_writes_nothing_on_an_expired_share() -> None:
    async with planes(2) as world:
        other = world.all[1]
        await world.quota(count(2))
        await other.manager.claims.create(CALLER, WANTED)
        assert other.control.shares is not None
        # Its share is not renewed: as if its process had not run for a while.
        await other.kill()
        world.all.remove(other)
        await asyncio.sleep(share_store.USE_SECONDS + 1)
        with pytest.raises(PaddockError, match="could not be renewed in time"):
            other.control.shares.require_valid_share("default")


@pytest.mark.parametrize("seed", range(4))
async def test_one_idempotency_key_on_several_control_planes_creates_one_sandbox(seed: int) -> None:
    async with planes(3, seed) as world:
        world.store.is_slow = True
        for number in range(5):
            wanted = NewSandbox(template="base", idempotency_key=f"key-{number}")
            made = await asyncio.gather(
                *(
                    plane.manager.claims.create(CALLER, wanted)
                    for plane in world.all
                    for _ in range(3)
                )
            )
            assert len({item.metadata.uid for item in made}) == 1
        assert world.now == 5


async def test_a_key_whose_claim_failed_or_whose_sandbox_was_killed_can_be_used_again() -> None:
    wanted = NewSandbox(template="base", timeout_seconds=None, idempotency_key="again")
    async with planes(2) as world:
        one, other = world.all
        await world.quota(count(0))
        with pytest.raises(QuotaExceededError):
            await one.manager.claims.create(CALLER, wanted)
        await world.quota(count(5))
        first = await other.manager.claims.create(CALLER, wanted)
        with pytest.raises(ConflictError):
            await one.manager.claims.create(
                CALLER, NewSandbox(template="base", idempotency_key="again", timeout_seconds=9)
            )
        await one.manager.lifecycle.kill(CALLER, id_of(first))
        async with asyncio.timeout(10):
            while one.control.provider.sandbox(first.key) is not None:
                await asyncio.sleep(0.01)
        second = await one.manager.claims.create(CALLER, wanted)
        assert second.metadata.uid != first.metadata.uid


async def test_the_key_record_of_a_dead_process_is_taken_over_and_old_records_are_swept() -> None:
    wanted = NewSandbox(
        template="base", timeout_seconds=None, idempotency_key="late", claim_timeout_seconds=5
    )
    async with planes(2) as world:
        one, other = world.all
        assert one.control.idempotency_keys is not None
        asked = "of one that died before it claimed"
        await one.control.idempotency_keys.acquire("default", "late", asked, seconds=5)
        with pytest.raises(ConflictError):
            await other.manager.claims.create(CALLER, wanted)
        await asyncio.sleep(idempotency.MARGIN_SECONDS + 10)
        await other.manager.claims.create(CALLER, wanted)
        await asyncio.sleep(
            idempotency.MARGIN_SECONDS + idempotency.KEEP_SECONDS + idempotency.SWEEP_SECONDS + 9
        )
        page = await world.store.list(Lease)
        assert not [
            item
            for item in page.items
            if item.metadata.labels.get(LABEL_KIND) == KIND_IDEMPOTENCY_KEY
        ]
