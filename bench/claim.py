"""Claims: from `Sandbox.create()` to the first command's result, through the real SDK.

    python bench/claim.py [--quick]

Starts an installation of its own in a temporary directory (root), measures warm sequential and
burst creates with the unmodified Python SDK beside a bare `bash -l -c` of the same image, bwrap,
crun, podman and OpenSandbox's server (where installed), and beside the same SDK against a server of
canned answers (`sdk_floor`: what is the client's own); the API's sustained claim rate, and the cost
of a claim at 10 and at 10,000 pooled sandboxes (simulated runtime). The warm tier alone.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import floors
import opensandbox
from reporting import Report

HERE = Path(__file__).parent
SDK = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock")) / "sdk" / "e2b-2.63.0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Installation:
    """A Paddock of the benchmark's own."""

    def __init__(self, **settings: object) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="paddock-bench-"))
        self.port = free_port()
        self.environment = {
            **os.environ,
            "PADDOCK_STATE_DIR": str(self.home / "state"),
            "PADDOCK_RUN_DIR": str(self.home / "run"),
            "PADDOCK_PORT": str(self.port),
            "PADDOCK_API_PORT": str(free_port()),
            **{f"PADDOCK_{key.upper()}": str(value) for key, value in settings.items()},
        }

    def __enter__(self) -> "Installation":
        command = [sys.executable, "-m", "paddock.app", "up", "--json"]
        self.process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the installation did not come up")
        up = json.loads(line)
        self.key, self.url = up["apiKey"], up["url"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        state = self.home / "state" / "node"
        if state.exists():
            self._purge(state)
        shutil.rmtree(self.home, ignore_errors=True)

    def _purge(self, state: Path) -> None:
        """End the sandboxes, which outlive the node that made them: a last node is told to."""
        path = self.home / "run" / "purge.sock"
        node = subprocess.Popen(
            [
                *(sys.executable, "-m", "paddock.runtime.local.node", "--purge-on-exit"),
                *("--state", state, "--socket", path, "--log-level", "error"),
            ]
        )
        deadline = time.monotonic() + 60
        while not path.exists() and node.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        node.terminate()
        node.wait(60)

    def written(self) -> int:
        """Give the number of the store's last write."""
        secrets = json.loads((self.home / "state" / "secrets.json").read_text())
        request = urllib.request.Request(
            f"{self.url}/apis/paddock.dev/v1alpha1/sandboxes?limit=1",
            headers={"Authorization": f"Bearer {secrets['token']}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(json.load(answer)["metadata"]["resourceVersion"])

    def client(self, mode: str, count: int) -> list[dict[str, float]]:
        return client(self.url, self.key, mode, count)

    def stocked(self, count: int) -> None:
        """Wait until the pool is full and nothing goes on any more."""
        asyncio.run(self._stocked(count))
        time.sleep(2)

    async def _stocked(self, count: int) -> None:
        import aiohttp

        secrets = json.loads((self.home / "state" / "secrets.json").read_text())
        async with aiohttp.ClientSession() as session:
            await stocked(session, self.url, secrets["token"], count)


def client(url: str, key: str, mode: str, count: int) -> list[dict[str, float]]:
    """Let the SDK create and run a command so many times."""
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
    """What the SDK takes when the answers are there at once."""
    port = free_port()
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
    report.figure("sdk_floor_burst_wall_s", max(item["wall"] for item in burst if item["ok"]))


def take(report: Report, name: str, entries: list[dict], key: str = "total") -> None:
    """Take in what the client measured, failures counted."""
    well = [item[key] for item in entries if item["ok"]]
    report.spread(name, well, failed=len(entries) - len(well))
    for item in entries:
        if not item["ok"]:
            report.note(f"failed: {item.get('error')}")
            break


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; a busy machine changes it less than the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> dict[str, int]:
    """The processes of an installation by what they are: control, gateway."""
    found: dict[str, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        found[words[-2]] = int(child)
    return found


async def api_rate(report: Report, stock: int, concurrency: int) -> None:
    """Warm claims a second over HTTP, as many as are in stock.

    The runtime is simulated, so that the control plane is the limit.
    """
    import aiohttp

    with Installation(runtime="simulated", pool_size=stock, gateways=1) as paddock:
        secrets = json.loads((paddock.home / "state" / "secrets.json").read_text())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await stocked(session, paddock.url, secrets["token"], stock)
            processes = children(paddock.process.pid)
            before = {name: cpu_seconds(pid) for name, pid in processes.items()}
            left = iter(range(stock))
            samples: list[float] = []
            written = paddock.written()

            async def work() -> None:
                for _ in left:
                    asked = time.perf_counter()
                    async with session.post(
                        f"{paddock.url}/v2/sandboxes",
                        json={"templateID": "base"},
                        headers={"X-API-Key": paddock.key},
                    ) as response:
                        if response.status != 201:
                            report.note(f"create failed: {await response.text()}")
                            continue
                        await response.read()
                    samples.append(time.perf_counter() - asked)

            started = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(concurrency)))
            seconds = time.perf_counter() - started
            used = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
            name = f"api_claim_by_{concurrency}"
            report.spread(name, samples, failed=stock - len(samples))
            report.figure(f"{name}_per_second", stock / seconds)
            # The pool fills up again meanwhile.
            report.writes(name, paddock.written() - written, stock)
            for process, cpu in used.items():
                report.figure(f"{name}_{process}_cpu_ms", cpu / stock * 1000)


async def stocked(session, url: str, token: str, count: int) -> None:
    """Wait until the pool is full."""
    path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"
    headers = {"Authorization": f"Bearer {token}"}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        async with session.get(url + path, headers=headers) as response:
            pool = await response.json()
        if pool.get("status", {}).get("available", 0) >= count:
            return
        await asyncio.sleep(0.5)
    raise SystemExit(f"the pool did not fill: {pool.get('status')}")


async def claim_cost(pool_size: int, claims: int) -> list[float]:
    """Seconds of claims in-process at a pool size, memory store and simulated runtime."""
    sys.path.insert(0, str(HERE.parent))
    from tests.scenario.paddock import CALLER, paddock

    from paddock.kit.clock import SystemClock
    from paddock.manager.requests import NewSandbox
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
                # Only what is in stock is a warm claim.
                async with asyncio.timeout(300):
                    while len(world.plane.census.members(world.pool().key).available) < pool_size:
                        await asyncio.sleep(0.1)
            started = time.perf_counter()
            await world.manager.create(CALLER, wanted)
            samples.append(time.perf_counter() - started)
            await asyncio.sleep(0.002)
        return samples


def main() -> None:
    report = Report("claim", __doc__)
    count = 30 if report.is_quick else 100
    floors.measure(report, count)
    opensandbox.measure(report, 10)
    together = 30 if report.is_quick else 100
    stock = together + 10
    sdk_floor(report, count, together)
    with Installation(pool_size=stock) as paddock:
        paddock.stocked(stock)
        before = paddock.written()
        sequential = paddock.client("sequential", count)
        take(report, "sequential", sequential)
        take(report, "create", sequential, "create")
        paddock.stocked(stock)
        # The client makes and ends one more before it measures.
        report.writes("create_kill_and_refill", paddock.written() - before, count + 1)
        burst = paddock.client("burst", together)
        take(report, "burst", burst)
        report.figure(
            "burst_wall_s", max((item["wall"] for item in burst if item["ok"]), default=0)
        )
    asyncio.run(api_rate(report, 500 if report.is_quick else 2000, 32))
    large = 2_000 if report.is_quick else 10_000
    for size in (10, large):
        report.spread(f"claim_at_{size}", asyncio.run(claim_cost(size, 100)))
    report.against("sequential", ("sdk_floor", *floors.ALTERNATIVES))
    report.against("create", [opensandbox.NAME])
    report.against("burst_wall_s", ["sdk_floor_burst_wall_s"])
    report.ratio(f"claim_at_{large}_to_10", f"claim_at_{large}", "claim_at_10")
    report.finish()


if __name__ == "__main__":
    main()
