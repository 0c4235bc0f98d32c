"""Ten thousand short-lived sandboxes on a simulated runtime: constant memory and latency.

On the real clock: it measures the cost of the control plane itself. `--load-minutes 10` sets the
duration; the default suits CI. `test_real_sandboxes.py` uses real sandboxes.
"""

import asyncio
import gc
import random
import time
from pathlib import Path

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import SystemClock
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

CLAIMED = 10_000
POOL = 200
CLIENTS = 8
WINDOWS = 6
WANTED = NewSandbox(template="base", timeout_seconds=36_000)
"""Longer than any run: an unused sandbox must not expire."""


def memory_mb() -> float:
    """Private memory with swap: other tests may turn swap on."""
    status = Path("/proc/self/status").read_text()
    parts = (status.split(f"{name}:")[1].split()[0] for name in ("RssAnon", "VmSwap"))
    return sum(map(int, parts)) / 1e3


def waited_seconds() -> float:
    """Seconds that this thread was runnable but waited for a CPU."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Churn:
    """Clients that replace, pause, wake and read sandboxes, and their number."""

    def __init__(self, world: World, ids: list[str]) -> None:
        self.world = world
        self.ids = ids
        self.done = 0
        self.failures: list[str] = []

    async def run(self, seconds: float) -> float:
        """Churn for this long; return the mean latency without the time other processes took."""
        began, waited, done = time.monotonic(), waited_seconds(), self.done
        end = began + seconds
        await asyncio.gather(*(self._client(random.Random(n), end) for n in range(CLIENTS)))
        own = (time.monotonic() - began) - (waited_seconds() - waited)
        # This number of clients is always served concurrently.
        return own * CLIENTS / max(self.done - done, 1)

    async def _client(self, dice: random.Random, end: float) -> None:
        manager = self.world.manager
        while time.monotonic() < end:
            # Removed while in use: two clients must not use the same one.
            name = self.ids.pop(dice.randrange(len(self.ids)))
            try:
                if dice.random() < 0.5:
                    await manager.lifecycle.kill(CALLER, name)
                    made = await manager.claims.create(CALLER, WANTED)
                    assert made.spec.claim is not None
                    name = made.spec.claim.sandbox_id
                else:
                    await manager.lifecycle.pause(CALLER, name)
                    await manager.lifecycle.connect(CALLER, name, timeout_seconds=36_000)
            except Exception as error:  # no failure is tolerated
                self.failures.append(repr(error))
                return
            finally:
                self.ids.append(name)
            self.done += 1


async def test_ten_thousand_sandboxes_churn_at_constant_memory_and_latency(
    request: pytest.FixtureRequest,
) -> None:
    seconds = 60 * float(request.config.getoption("--load-minutes"))
    clock = SystemClock()
    runtime = SimulatedRuntime(clock=clock, latencies={})
    store = MemoryStore(clock=clock)
    async with paddock(
        pool_size=POOL, runtime=runtime, store=store, clock=clock, cold_creates_per_second=100_000
    ) as world:
        ids: list[str] = []
        while len(ids) < CLAIMED:
            made = await asyncio.gather(
                *(world.manager.claims.create(CALLER, WANTED) for _ in range(100))
            )
            ids += [item.spec.claim.sandbox_id for item in made if item.spec.claim]
        churn = Churn(world, ids)
        await churn.run(seconds / WINDOWS)  # Warm-up: caches are full.
        tasks = len(asyncio.all_tasks())
        memory: list[float] = []
        mean: list[float] = []
        for _ in range(WINDOWS):
            mean.append(await churn.run(seconds / WINDOWS))
            gc.collect()
            memory.append(memory_mb())
        figures = f"memory {memory} MB, means {[round(item * 1e3, 1) for item in mean]} ms"
        print(figures)
        assert not churn.failures, churn.failures[:3]
        assert len(ids) == CLAIMED
        assert memory[-1] < memory[0] * 1.1 + 10, figures
        # Compare halves, since the machine has other load in between.
        first, last = mean[: WINDOWS // 2], mean[WINDOWS // 2 :]
        assert min(last) < 2 * max(first), figures
        # A few more or less are at work at any moment.
        assert len(asyncio.all_tasks()) <= tasks + 20
