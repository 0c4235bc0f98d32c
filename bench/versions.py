"""Compare two checkouts of Paddock: claims, cold starts and the gateway, alternated in one run.

    python bench/versions.py OLD [NEW] [--rounds 10] [--only claim,cold,gateway]

OLD and NEW (default: this checkout) are directories. Both run an installation at the same time, and
each round measures one and then the other, in turns of order. The last line is JSON: for each
figure the median of each checkout and the median of the paired ratios new / old. CPU is that of the
control plane or the gateway, so a busy machine affects it less than the clock. Needs root and wrk.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
FIGURES = ("claim", "cold", "gateway")
CLAIMS = 30
COLD_STARTS = 15
LOAD_SECONDS = 4
CONNECTIONS = 16


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's threads, in nanosecond steps."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def machine_seconds() -> float:
    """CPU time of the whole machine: everything but idle, waiting and stolen time."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:7])) / os.sysconf("SC_CLK_TCK")


async def serve(tree: Path) -> None:
    """Run installations of one checkout and measure on request: figures from stdin to stdout."""
    sys.path[:0] = [str(tree), str(tree / "src")]
    from tests.installation import Installation

    warm = Installation(pool_size=CLAIMS + 10, gateways=1)
    empty = Installation(pool_size=0, gateways=1, cold_creates_per_second=1000)
    async with warm, empty:
        target = await warm.create(timeout=3600)
        measures = {
            "claim": lambda: creates(warm, CLAIMS, "claim"),
            "cold": lambda: creates(empty, COLD_STARTS, "cold"),
            "gateway": lambda: traffic(warm, target),
        }
        print(json.dumps("ready"), flush=True)
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(json.dumps(await measures[name]()), flush=True)


async def creates(paddock: Any, count: int, name: str) -> dict[str, float]:
    """Create sandboxes, run a command in each, and kill them."""
    created, total, boxes = [], [], []
    pids = {process: paddock.pid(process) for process in ("control", "node")}
    before = {process: cpu_seconds(pid) for process, pid in pids.items()}
    busy = machine_seconds()
    for _ in range(count):
        began = time.perf_counter()
        box = await paddock.create(timeout=600)
        created.append(time.perf_counter() - began)
        assert await paddock.run(box, "echo hello") == "hello\n"
        total.append(time.perf_counter() - began)
        boxes.append(box)
    used = {process: cpu_seconds(pid) - before[process] for process, pid in pids.items()}
    busy = machine_seconds() - busy
    for box in boxes:
        await paddock.api("DELETE", f"/sandboxes/{box.id}")
    if name == "claim":
        await paddock.stocked()
    return {
        f"{name}_create_ms": median(created) * 1e3,
        f"{name}_first_command_ms": median(total) * 1e3,
        **{f"{name}_{process}_cpu_ms": cpu / count * 1e3 for process, cpu in used.items()},
        f"{name}_machine_cpu_ms": busy / count * 1e3,
    }


async def traffic(paddock: Any, box: Any) -> dict[str, float]:
    """Send requests to the envd of one sandbox through the gateway."""
    gateway = paddock.pid("gateway-0")
    used = cpu_seconds(gateway)
    process = await asyncio.create_subprocess_exec(
        *("wrk", "-t1", f"-c{CONNECTIONS}", f"-d{LOAD_SECONDS}s"),
        *("-H", f"E2b-Sandbox-Id: {box.id}", "-H", "E2b-Sandbox-Port: 49983"),
        *("-H", f"X-Access-Token: {box.envd_access_token or ''}"),
        f"{paddock.url}/health",
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    text = output.decode()
    assert "Non-2xx" not in text, text
    requests = int(text.split(" requests in")[0].split()[-1])
    used = cpu_seconds(gateway) - used
    return {
        "gateway_cpu_us": used / requests * 1e6,
        "gateway_requests_per_second": requests / LOAD_SECONDS,
    }


class Checkout:
    """One checkout, measured by a process of its own."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.process = subprocess.Popen(
            [sys.executable, HERE, str(tree), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": f"{tree}:{tree / 'src'}"},
        )
        self.read()

    def read(self) -> Any:
        """Return the next line of the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the installation of {self.tree} ended: {self.process.wait()}")
        return json.loads(line)

    def measure(self, name: str) -> dict[str, float]:
        """Measure one figure."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        return self.read()

    def commit(self) -> str:
        """Return the commit of the checkout."""
        command = ["git", "-C", str(self.tree), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def running(tree: Path) -> Iterator[Checkout]:
    """Run a checkout, and stop its installations afterwards."""
    checkout = Checkout(tree)
    try:
        yield checkout
    finally:
        assert checkout.process.stdin is not None
        checkout.process.stdin.close()
        checkout.process.wait(120)


def compare(old: Checkout, new: Checkout, names: list[str], rounds: int) -> dict[str, Any]:
    """Measure both checkouts alternately; return medians and paired ratios."""
    samples: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        old.measure(name), new.measure(name)  # The first of each warms up.
    for number in range(rounds):
        for name in names:
            first, second = (old, new) if number % 2 == 0 else (new, old)
            results = {first: first.measure(name), second: second.measure(name)}
            for figure, value in results[old].items():
                samples.setdefault(figure, []).append((value, results[new][figure]))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        figure: {
            "old": round(median(a for a, _ in pairs), 3),
            "new": round(median(b for _, b in pairs), 3),
            "ratio": round(median(b / a for a, b in pairs), 3),
            "rounds": len(pairs),
        }
        for figure, pairs in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=HERE.parents[1])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default=",".join(FIGURES), help="figures, separated by commas")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.old.resolve()))
        return
    names = given.only.split(",")
    if unknown := set(names) - set(FIGURES):
        parser.error(f"unknown figures: {', '.join(sorted(unknown))}")
    with running(given.old.resolve()) as old, running(given.new.resolve()) as new:
        result = compare(old, new, names, given.rounds)
        commits = {"old": old.commit(), "new": new.commit()}
    print(json.dumps({"comparison": commits, "figures": result}))


if __name__ == "__main__":
    main()
