"""Claims: from `Sandbox.create()` to the first command's result, through the real SDK.

    python bench/claim.py [--quick]

Starts an installation of its own (root), with a gateway per core as `paddock up` has them, and
measures warm sequential and burst creates with the unmodified Python SDK beside a bare `bash -l -c`
of the same image, bwrap, crun, podman and OpenSandbox's server (where installed), and beside the
same SDK against a server of canned answers (`sdk_floor`: what is the client's own); the API's
sustained claim rate, and the cost of a claim at 10 and at 10,000 pooled sandboxes (simulated
runtime). The warm tier alone.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import floors
import opensandbox
from counting import writes
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Installation  # noqa: E402
from tests.ports import free_ports  # noqa: E402

HERE = Path(__file__).parent
SDK = floors.CACHE / "sdk" / "e2b-2.63.0"
BURSTS = 5
CLAIMS = 200
"""Claims in one process, at each pool size."""


async def driven(paddock: Installation, mode: str, count: int) -> list[dict]:
    """Run the SDK against an installation in other processes."""
    return await asyncio.to_thread(client, paddock.url, paddock.secrets.api_key, mode, count)


async def stocked(paddock: Installation) -> None:
    """Wait until the pool is full and nothing is in flight."""
    await paddock.stocked()
    await asyncio.sleep(2)


def client(url: str, key: str, mode: str, count: int) -> list[dict]:
    """Create and run a command with the SDK, this many times."""
    output = subprocess.run(
        [SDK / "bin" / "python", HERE / "clients" / "tti.py", mode, str(count)],
        env={
            **os.environ,
            "PYTHONPATH": "",
            "E2B_API_KEY": key,
            "E2B_API_URL": url,
            "E2B_SANDBOX_URL": url,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def sdk_floor(report: Report, count: int, together: int) -> None:
    """The SDK's own time, with immediate answers."""
    [port] = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, HERE / "clients" / "canned.py", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        url, key = f"http://127.0.0.1:{port}", "e2b_" + "0" * 40
        sequential = client(url, key, "sequential", count)
        burst = client(url, key, "burst", together)
    finally:
        server.terminate()
        server.wait(10)
    take(report, "sdk_floor", sequential)
    take(report, "sdk_floor_burst", burst)
    wall = max(item["wall"] for item in burst if item["ok"])
    report.figure("sdk_floor_burst_wall_s", wall, "one burst")


def take(report: Report, name: str, entries: list[dict], key: str = "total") -> None:
    """Add the client's measurements, with failures counted."""
    well = [item[key] for item in entries if item["ok"]]
    report.spread(name, well, failed=len(entries) - len(well))
    for item in entries:
        if not item["ok"]:
            report.note(f"failed: {item.get('error')}")
            break


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; a busy machine affects it less than the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def api_rate(report: Report, stock: int, concurrency: int) -> None:
    """Warm claims per second over HTTP, as many as are in stock.

    The runtime is simulated, so that the control plane is the limit.
    """
    async with Installation(runtime="simulated", pool_size=stock, gateways=1) as paddock:
        processes = {"control": paddock.pid("control"), "gateway": paddock.pid("gateway-0")}
        before = {name: cpu_seconds(pid) for name, pid in processes.items()}
        left = iter(range(stock))
        samples: list[float] = []
        written = await writes(paddock)
        headers = {"X-API-Key": paddock.secrets.api_key}

        async def work() -> None:
            for _ in left:
                with report.trying("a create"):
                    asked = time.perf_counter()
                    async with paddock.http.post(
                        f"{paddock.url}/v2/sandboxes", json={"templateID": "base"}, headers=headers
                    ) as response:
                        assert response.status == 201, await response.text()
                        await response.read()
                    samples.append(time.perf_counter() - asked)

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        seconds = time.perf_counter() - started
        used = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
        name = f"api_claim_by_{concurrency}"
        report.spread(name, samples, failed=stock - len(samples))
        report.figure(f"{name}_per_second", len(samples) / seconds, f"one run of {stock:,}")
        # The pool refills meanwhile.
        report.writes(name, await writes(paddock) - written, stock)
        for process, cpu in used.items():
            report.figure(f"{name}_{process}_cpu_ms", cpu / stock * 1000, f"mean of {stock:,}")


async def claim_cost(report: Report, pool_size: int, claims: int) -> list[float]:
    """Seconds of claims in-process at a pool size, memory store and simulated runtime."""
    from tests.scenario.paddock import CALLER, paddock

    from paddock.claims.requests import NewSandbox
    from paddock.kit.clock import SystemClock
    from paddock.runtime.simulated import SimulatedRuntime
    from paddock.store.memory import MemoryStore

    runtime = SimulatedRuntime(clock=SystemClock(), latencies={})
    async with paddock(
        pool_size=pool_size, runtime=runtime, store=MemoryStore(), clock=SystemClock()
    ) as world:
        wanted = NewSandbox(template="base")
        samples = []
        for number in range(claims):
            if number % (pool_size - 1) == 0:
                # Only claims from stock are warm claims.
                async with asyncio.timeout(300):
                    while (
                        len(world.plane.pool_members.members(world.pool().key).available)
                        < pool_size
                    ):
                        await asyncio.sleep(0.1)
            with report.trying("a claim"):
                started = time.perf_counter()
                await world.manager.claims.create(CALLER, wanted)
                samples.append(time.perf_counter() - started)
            await asyncio.sleep(0.002)
        return samples


async def warm(report: Report, count: int, together: int) -> None:
    """Sequential, then all at once, a few times."""
    bursts = 1 if report.is_quick else BURSTS
    async with Installation(pool_size=together + 10, gateways=os.cpu_count() or 1) as paddock:
        await stocked(paddock)
        before = await writes(paddock)
        sequential = await driven(paddock, "sequential", count)
        take(report, "sequential", sequential)
        take(report, "create", sequential, "create")
        await stocked(paddock)
        # The client creates and kills one more before it measures.
        report.writes("create_kill_and_refill", await writes(paddock) - before, count + 1)
        entries: list[dict] = []
        walls: list[float] = []
        for _ in range(bursts):
            burst = await driven(paddock, "burst", together)
            entries += burst
            if all(item["ok"] for item in burst):
                walls.append(max(item["wall"] for item in burst))
            await stocked(paddock)
    take(report, "burst", entries)
    if walls:
        report.figure("burst_wall_s", median(walls), f"median of {len(walls)} bursts")


def main() -> None:
    report = Report("claim", __doc__)
    count = 30 if report.is_quick else 100
    floors.measure(report, count)
    opensandbox.measure(report, 20)
    together = 30 if report.is_quick else 100
    sdk_floor(report, count, together)
    asyncio.run(warm(report, count, together))
    asyncio.run(api_rate(report, 500 if report.is_quick else 2000, 32))
    large = 2_000 if report.is_quick else 10_000
    for size in (10, large):
        samples = asyncio.run(claim_cost(report, size, CLAIMS))
        report.spread(f"claim_at_{size}", samples, failed=CLAIMS - len(samples))
    report.against("sequential", ("sdk_floor", *floors.ALTERNATIVES))
    report.against("create", [opensandbox.NAME])
    report.against("burst_wall_s", ["sdk_floor_burst_wall_s"])
    report.ratio(f"claim_at_{large}_to_10", f"claim_at_{large}", "claim_at_10")
    report.finish()


if __name__ == "__main__":
    main()
