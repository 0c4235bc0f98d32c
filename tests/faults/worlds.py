"""One store, one runtime, and control planes that start, lead, and are killed."""

import asyncio
import contextlib
import itertools
from asyncio import Task
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from paddock.app.roles.control_plane import ControlPlane
from paddock.app.wiring import default_resources
from paddock.engine.election import Elector
from paddock.kit.clock import LoopClock
from paddock.kit.errors import PaddockError
from paddock.kit.tasks import background
from paddock.manager.service import Manager
from paddock.resources.meta import Key
from paddock.runtime.simulated import SimulatedRuntime
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from tests.faults.broken import BrokenRuntime, BrokenStore, Faults
from tests.faults.virtual import Process, Trace
from tests.scenario.paddock import SECRETS

LEASE = Key("paddock-system", "controllers")
SERVING = ("federation", "quota shares", "failed claims", "sampling", "key usage")
"""Parts that serve requests; they run without leadership, too."""
Done = TypeVar("Done")


class JumpingClock(LoopClock):
    """Virtual time with a wall clock that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = timedelta()

    def now(self):
        return super().now() + self.offset

    def jump(self, seconds: float) -> None:
        self.offset += timedelta(seconds=seconds)


class Plane:
    """One control plane of a world: it runs until it is killed."""

    def __init__(self, world: "FaultyWorld", number: int, *, elects: bool) -> None:
        who = f"plane-{number}"
        self.process = Process()
        self.store = BrokenStore(world.store, world.faults, who)
        self.runtime = BrokenRuntime(world.runtime, world.faults, who)
        self.control = ControlPlane(
            Settings(pool_size=world.pool_size, cold_creates_per_second=50),
            SECRETS,
            store=self.store,  # pyright: ignore[reportArgumentType]
            runtime=self.runtime,  # pyright: ignore[reportArgumentType]
            clock=world.clock,
        )
        self.ready = asyncio.Event()
        self.dead = asyncio.Event()
        self._elector = Elector(self.store, LEASE, who, clock=world.clock) if elects else None
        self._task = self.begin(self._run(), name=who)

    @property
    def manager(self) -> Manager:
        return self.control.manager

    def begin(self, work: Coroutine[Any, Any, Done], *, name: str = "request") -> Task[Done]:
        """Run something in its process, which may be stopped."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=name, context=self.process.context.copy())

    @property
    def leads(self) -> bool:
        return self._elector is None or self._elector.is_leader

    async def _run(self) -> None:
        control = self.control
        async with control.provider.run():
            while True:
                try:
                    await default_resources.ensure(
                        control.store, control.keyring, control.settings, SECRETS.api_key
                    )
                    break
                except PaddockError:
                    await asyncio.sleep(0.5)
            self.ready.set()
            async with background(self._work(SERVING.__contains__), name="serving"):
                if self._elector is None:
                    await self._lead()
                else:
                    await self._elector.run(self._lead)

    async def _lead(self) -> None:
        await self._work(lambda name: name not in SERVING)

    async def _work(self, is_wanted: Callable[[str], bool]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, work in self.control.work().items():
                if is_wanted(name):
                    await stack.enter_async_context(background(work, name=name))
                else:
                    work.close()
            await asyncio.Event().wait()

    async def serves(self) -> None:
        """Wait until it serves; raise the error that prevents it."""
        ready = asyncio.ensure_future(self.ready.wait())
        try:
            await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await self._task
        finally:
            ready.cancel()

    async def kill(self) -> None:
        """Kill it between two instructions: nothing of it has an effect afterwards."""
        self.store.is_severed = self.runtime.is_severed = True
        self.dead.set()
        self.process.resume()
        self._task.cancel()
        await asyncio.wait((self._task,))

    def failure(self) -> BaseException | None:
        """Return the error that ended it unexpectedly."""
        if self._task.done() and not self._task.cancelled():
            return self._task.exception()
        return None


class FaultyWorld:
    """The store and runtime, and the running control planes."""

    def __init__(self, seed: int, trace: Trace, *, pool_size: int = 6, count: int = 1) -> None:
        self.seed = seed
        self.trace = trace
        self.pool_size = pool_size
        self.clock = JumpingClock()
        self.faults = Faults(seed, trace)
        self.store = MemoryStore(clock=self.clock)
        self.runtime = SimulatedRuntime(clock=self.clock, jitter=0.5, seed=seed)
        self.planes: list[Plane] = []
        self.kills = 0
        self.count = count
        self._numbers = itertools.count(1)

    async def start(self) -> Plane:
        """Start a control plane; it serves when this returns."""
        plane = Plane(self, next(self._numbers), elects=self.count > 1)
        try:
            await plane.serves()
        except BaseException:
            await plane.kill()
            raise
        self.planes.append(plane)
        return plane

    async def replace(self, plane: Plane) -> Plane:
        """Kill one and start its successor."""
        self.kills += 1
        self.planes.remove(plane)
        await plane.kill()
        return await self.start()

    def has_killed(self, kills: int) -> bool:
        """Whether this many were killed and all are replaced."""
        return self.kills >= kills and len(self.planes) == self.count

    async def is_restored(self) -> None:
        """Finish a replacement that the end of the faults interrupted."""
        while len(self.planes) < self.count:
            await self.start()

    async def end_faults(self) -> None:
        """End all faults."""
        self.faults.end_faults()
        self.runtime.fail_node(is_down=False)


@contextlib.asynccontextmanager
async def faulty_world(
    seed: int, trace: Trace, *, planes: int = 1, pool_size: int = 6
) -> AsyncGenerator[FaultyWorld]:
    """Yield a world with this many control planes; kill them all in the end."""
    world = FaultyWorld(seed, trace, pool_size=pool_size, count=planes)
    try:
        await world.is_restored()
        yield world
    finally:
        for plane in world.planes:
            await plane.kill()
