"""Time to interactive: `Sandbox.create()` to the first command's output, through the real SDK.

    python bench/tti.py [--quick]

The modes of the field's own yardstick: sequential 100, staggered 100 every 200 ms, burst 100, and
an open loop of Poisson arrivals for 60 s, in windows of 10 s; and the burst once more on a pool
that is too small for it. The pool is warm and refills while it is drawn from. What found it empty
is a `_cold` series of its own: tiers are never mixed (`cold.py` has the cold one alone,
`hibernate_fork.py` the clones). The clock is the client's. Beside it, in the same run: fork and
exec, bubblewrap, crun, podman, each to the output of the same command from the same image;
OpenSandbox's server to the end of its create, against ours. Needs root; starts an installation of
its own.
"""

import asyncio
import json
import subprocess

import floors
import opensandbox
from counting import cold_starts, writes
from floors import ALTERNATIVES, CACHE
from reporting import ROOT, Report

import sys  # isort: skip

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Installation  # noqa: E402

SDK = CACHE / "sdk" / "e2b-2.63.0" / "bin" / "python"
CLIENT = ROOT / "bench" / "clients" / "load.py"
POOL = 12 if "--quick" in sys.argv else 20
RATE = 4.0
"""Arrivals per second of the open loop."""


async def client(paddock: Installation, *arguments: object) -> list[dict]:
    environment = paddock.environment | {
        "E2B_API_KEY": paddock.secrets.api_key,
        "E2B_API_URL": paddock.url,
        "E2B_SANDBOX_URL": paddock.url,
        "PYTHONPATH": "",
    }
    done = await asyncio.to_thread(
        subprocess.run,
        [SDK, CLIENT, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=400,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_tier(results: list[dict], *, is_cold: bool) -> tuple[list[dict], int]:
    """Return the successes of a tier, and the number of failures.

    A failure before the sandbox existed belongs to no tier: it counts in each.
    """
    mine = [item for item in results if "id" in item and item["is_cold"] == is_cold]
    well = [item for item in mine if item["ok"]]
    if not mine and is_cold:
        return [], 0
    nowhere = sum("id" not in item for item in results)
    return well, len(mine) - len(well) + nowhere


def take(report: Report, name: str, results: list[dict]) -> None:
    """Add one load shape; cold starts are a separate series."""
    well = sum(bool(item["ok"]) for item in results)
    report.figure(f"{name}_success", well / len(results), f"of {len(results)}, warm and cold")
    for tier, is_cold in (("", False), ("cold_", True)):
        samples, failed = of_tier(results, is_cold=is_cold)
        for key in ("total", "create"):
            report.spread(f"{name}_{tier}{key}", [item[key] for item in samples], failed=failed)
    for item in results:
        if not item["ok"]:
            report.note(f"failed: {item.get('error')}")
            break


async def shape(paddock: Installation, report: Report, name: str, *arguments: object) -> list[dict]:
    """Wait for a full pool, run the client; return its attempts, cold ones marked."""
    await paddock.stocked()
    async with cold_starts(paddock) as cold:
        results = await client(paddock, *arguments)
    for item in results:
        item["is_cold"] = item.get("id") in cold
    take(report, name, results)
    if arguments[0] == "burst" and not any(item["is_cold"] for item in results):
        wall = max(item.get("wall", 0) for item in results)
        report.figure(f"{name}_wall_ms", wall * 1e3, "one burst, until the last has answered")
    return results


async def resized(paddock: Installation, size: int) -> None:
    """Resize the pool."""
    path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"
    body = {"spec": {"replicas": size}}
    await paddock.kube("PATCH", path, body, kind="application/merge-patch+json")
    paddock.settings["pool_size"] = size


async def main() -> None:
    report = Report("tti", __doc__)
    count = 12 if report.is_quick else 100
    seconds = 5 if report.is_quick else 60
    floors.measure(report, count)
    opensandbox.measure(report, 10)
    async with Installation(pool_size=POOL, gateways=1) as paddock:
        await client(paddock, "sequential", 3)
        await paddock.stocked()
        before = await writes(paddock)
        await shape(paddock, report, "sequential", "sequential", count)
        await paddock.stocked()
        # The client creates and kills one more before it measures.
        report.writes("create_kill_and_refill", await writes(paddock) - before, count + 1)
        await shape(paddock, report, "staggered", "staggered", count)
        await paddock.stocked()
        before = await writes(paddock)
        arrivals = await shape(paddock, report, "poisson", "poisson", seconds, RATE)
        await paddock.stocked()
        report.writes("poisson_arrival", await writes(paddock) - before, len(arrivals) + 1)
        for start in range(0, seconds, 10):
            window = [item for item in arrivals if start <= item["at"] < start + 10]
            well, failed = of_tier(window, is_cold=False)
            report.spread(f"poisson_{start}s", [item["total"] for item in well], failed=failed)
        if count > POOL:
            name = f"burst_{count}_pool_{POOL}"
            tried = await shape(paddock, report, name, "burst", count)
            if not any(item["is_cold"] for item in tried):
                report.absent(f"{name}_cold_total", "none: the pool was filled fast enough")
        await resized(paddock, count + 10)
        await shape(paddock, report, f"burst_{count}", "burst", count)
        await paddock.stocked()  # No creation is in flight when it ends.
    for name in ("sequential", "staggered", "poisson", f"burst_{count}"):
        report.against(f"{name}_total", ALTERNATIVES, label=name)
    report.against("sequential_create", [opensandbox.NAME])
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
