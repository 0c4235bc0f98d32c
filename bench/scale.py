"""Scale: the cost of each operation with 1,000, 10,000 and 100,000 sandboxes; memory.

    python bench/scale.py [--quick]

The runtime is simulated, the control plane is real: store in memory, controllers, cache, manager.
Each size runs in a process of its own. A cost that does not grow with size has a ratio near 1. The
floor is one bare write of that store: what every operation that writes pays at least. Nothing that
other suites compare with can hold as many. Writes of the store are counted while each operation is
under way, and those of a whole life with everything that controllers write because of it.
"""

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

SIZES = (1_000, 10_000, 100_000)
QUICK = (1_000, 5_000)
OPERATIONS = ("create", "get", "list", "pause", "connect", "set_timeout", "kill")
FLOOR = "bare_write"


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


@contextlib.contextmanager
def said(what: str) -> Generator[None]:
    """Continue when an attempt fails; the report is in another process."""
    try:
        yield
    except Exception as error:
        print(f"{what} failed: {error!r}", file=sys.stderr)


async def measure(size: int, rounds: int) -> dict[str, object]:
    from tests.scenario.paddock import CALLER, paddock

    from paddock.claims.requests import NewSandbox
    from paddock.kit.clock import SystemClock
    from paddock.manager.sandboxes.requests import SandboxFilter
    from paddock.resources.kinds.builtin import Namespace
    from paddock.resources.kinds.sandbox import Sandbox
    from paddock.resources.meta import ObjectMeta, with_meta
    from paddock.runtime.simulated import SimulatedRuntime
    from paddock.store.memory import MemoryStore

    clock = SystemClock()
    runtime = SimulatedRuntime(clock=clock, latencies={})
    empty = resident_mb()
    store = MemoryStore(clock=clock)

    async def version() -> int:
        return int((await store.list(Sandbox, limit=1)).version)

    async with paddock(pool_size=size, runtime=runtime, store=store, clock=clock) as world:
        began = time.perf_counter()
        pool_members, key = world.plane.pool_members, world.pool().key
        while len(pool_members.members(key).available) < size:
            await asyncio.sleep(0.2)
        filled = time.perf_counter() - began
        gc.collect()
        weight = resident_mb() - empty
        wanted = NewSandbox(template="base")
        times: dict[str, list[float]] = {name: [] for name in (*OPERATIONS, FLOOR)}
        written: dict[str, int] = dict.fromkeys(OPERATIONS, 0)

        async def timed(name: str, work):
            before = await version()
            started = time.perf_counter()
            result = await work
            times[name].append(time.perf_counter() - started)
            if name in written:
                written[name] += await version() - before
            return result

        async def life() -> None:
            made = await timed("create", manager.claims.create(CALLER, wanted))
            name = made.spec.claim.sandbox_id
            await timed("get", manager.queries.get(CALLER, name))
            await timed("list", listed())
            await timed("pause", manager.lifecycle.pause(CALLER, name))
            await timed("connect", manager.lifecycle.connect(CALLER, name, timeout_seconds=300))
            await timed(
                "set_timeout", manager.lifecycle.set_timeout(CALLER, name, timeout_seconds=60)
            )
            await timed("kill", manager.lifecycle.kill(CALLER, name))

        async def listed() -> None:
            world.manager.queries.page(
                CALLER, SandboxFilter(), limit=100, token=None, ascending=False
            )

        manager = world.manager
        bare = await store.create(Namespace(metadata=ObjectMeta(name="floor")))
        for number in range(rounds):
            changed = with_meta(bare, labels={"number": str(number)})
            bare = await timed(FLOOR, store.update(changed))
        before = await version()
        for _ in range(rounds):
            with said("a life"):  # Attempts that were not made count as failed.
                await life()
            await asyncio.sleep(0.002)
        while len(pool_members.members(key).available) < size:
            await asyncio.sleep(0.05)
        written["life_and_refill"] = await version() - before
    return {
        "times": times,
        "writes": written,
        "fill_per_second": size / filled,
        "kib_each": weight * 1e3 / 1.024 / size,
        "rss_mb": resident_mb(),
    }


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--size":
        print(json.dumps(asyncio.run(measure(int(sys.argv[2]), int(sys.argv[3])))))
        return
    report = Report("scale", __doc__)
    sizes, rounds = (QUICK, 100) if report.is_quick else (SIZES, 500)
    for size in sizes:
        report.note(f"{size} sandboxes")
        done = subprocess.run(
            [sys.executable, __file__, "--size", str(size), str(rounds)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        for name, samples in found["times"].items():
            report.spread(f"{name}_{size}", samples, failed=rounds - len(samples))
        for name, count in found["writes"].items():
            report.writes(f"{name}_{size}", count, rounds)
        report.figure(f"fill_per_second_{size}", found["fill_per_second"])
        report.figure(f"kib_each_{size}", found["kib_each"], f"mean of {size:,}")
        report.figure(f"rss_mb_{size}", found["rss_mb"])
    for name in (*OPERATIONS, FLOOR):
        report.ratio(
            f"{name}_{sizes[-1]}_to_{sizes[0]}", f"{name}_{sizes[-1]}", f"{name}_{sizes[0]}"
        )
    for name in OPERATIONS:
        report.ratio(
            f"{name}_{sizes[-1]}_to_{FLOOR}", f"{name}_{sizes[-1]}", f"{FLOOR}_{sizes[-1]}"
        )
    report.finish()


if __name__ == "__main__":
    main()
