"""Ten thousand sandboxes that come and go, on a simulated runtime: memory and latency stay flat.

On the real clock: what is measured is what the control plane itself costs. `--load-minutes 10`
makes it last; the default suits CI. Real sandboxes are `test_real_sandboxes.py`'s business.
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
"""Longer than any run: what is not looked at for a while must not end by itself."""


def memory_mb() -> float:
    """What this process has of its own: other tests may turn swap on, and take some of it away."""
    status = Path("/proc/self/status").read_text()
    parts = (status.split(f"{name}:")[1].split()[0] for name in ("RssAnon", "VmSwap"))
    return sum(map(int, parts)) / 1e3


def waited_seconds() -> float:
    """How long this thread could have run, and had to wait for a processor, so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Churn:
    """Clients that replace, pause, wake and look at sandboxes, and how many they were."""

    def __init__(self, world: World, ids: list[str]) -> None:
        self.world = world
        self.ids = ids
        self.done = 0
        self.failures: list[str] = []

    async def run(self, seconds: float) -> float:
        """Churn for so long; gives the mean latency, less what others took of this processor."""
        began, waited, done = time.monotonic(), waited_seconds(), self.done
        end = began + seconds
        await asyncio.gather(*(self._client(random.Random(n), end) for n in range(CLIENTS)))
        own = (time.monotonic() - began) - (waited_seconds() - waited)
        # So many clients are served at once, all the time.
        return own * CLIENTS / max(self.done - done, 1)

    async def _client(self, dice: random.Random, end: float) -> None:
        manager = self.world.manager
        while time.monotonic() < end:
            # Taken out while it is used: two clients must not quarrel about one.
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
            except Exception as error:  # every failure is one too many
                self.failures.append(repr(error))
                return
            finally:
                self.ids.append(name)
            self.done += 1


async def test_ten_thousand_sandboxes_churn_at_flat_memory_and_latency(
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
        await churn.run(seconds / WINDOWS)  # Everything has been used once: caches are full.
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
        # Of halves, since the machine has other things to do in between.
        first, last = mean[: WINDOWS // 2], mean[WINDOWS // 2 :]
        assert min(last) < 2 * max(first), figures
        names = asyncio.all_tasks()
        assert len(names) < 200, f"{len(names)} tasks are left"
