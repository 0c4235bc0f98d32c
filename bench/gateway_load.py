"""Generates and measures load for the gateway benchmarks.

Load runs on one core, the proxy under it on the other. `wrk` asks as fast as it goes and gives its
whole histogram, so that slices of several turns can be put together; `calm` asks at a fixed rate.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from floors import AbsentError, program
from gateway_parts import SEED, sandbox_id
from reporting import SHARES, Report, figure_of

LOAD_CORE, PROXY_CORE = "0", str((os.cpu_count() or 1) - 1)
PARTS = str(Path(__file__).with_name("gateway_parts.py"))
CALLED = 64
RATE = 1000
"""Requests per second of a calm load."""


class Target(NamedTuple):
    """A target of load."""

    port: int
    running: subprocess.Popen[bytes] | None
    """The proxy; `None` for the upstream itself."""


class Slice(NamedTuple):
    """Results of one run of `wrk`."""

    seconds: float
    answers: int
    refused: int
    """Answers with an error status."""
    lost: int
    """Requests without an answer: broken connections and timeouts."""
    size: int
    micros: Counter[int]

    @property
    def rps(self) -> float:
        return (self.answers - self.refused) / self.seconds

    @property
    def mb_per_s(self) -> float:
        return self.size / self.seconds / 1e6


@contextlib.contextmanager
def process(command: list[str], port: int, core: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server on one core; `AbsentError` with its last output if it does not start."""
    with tempfile.TemporaryFile() as words:
        started = subprocess.Popen(
            ["taskset", "-c", core, *command], stdout=subprocess.DEVNULL, stderr=words
        )
        try:
            deadline = time.monotonic() + 20
            while not _listens(port):
                if started.poll() is not None or time.monotonic() > deadline:
                    words.seek(0)
                    raise AbsentError(f"it does not start here: {words.read()[-300:]!r}")
                time.sleep(0.05)
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def lua(directory: Path, path: str, *, is_unique: bool = False) -> Path:
    """A load on 64 sandboxes in turn, with their tokens; optionally with unique heads."""
    tokens = ",".join(
        f'{{"{sandbox_id(n)}","{SEED.access_token(sandbox_id(n))}"}}' for n in range(CALLED)
    )
    script = directory / f"load{path.replace('/', '-')}{is_unique}.lua"
    one = "return made[at]"
    if is_unique:
        one = 'n = n + 1; return (made[at]:gsub("GET /", "GET /" .. n, 1))'
    script.write_text(f"""
local who, made, at, n = {{{tokens}}}, {{}}, 0, 0
init = function()
  for i, it in ipairs(who) do
    made[i] = wrk.format("GET", "{path}", {{["E2b-Sandbox-Id"]=it[1],
      ["E2b-Sandbox-Port"]="49983", ["X-Access-Token"]=it[2], ["Host"]="localhost"}})
  end
end
request = function() at = at % #made + 1; {one} end
done = function(summary, latency, _)
  local bad, micros = summary.errors, {{}}
  for i = 1, #latency do
    local value, count = latency(i)
    micros[i] = string.format("[%d,%d]", tonumber(value), tonumber(count))
  end
  io.write(string.format(
    '{{"seconds":%.6f,"answers":%d,"size":%d,"refused":%d,"lost":%d,"micros":[%s]}}\\n',
    summary.duration / 1e6, summary.requests, summary.bytes, bad.status,
    bad.connect + bad.read + bad.write + bad.timeout, table.concat(micros, ",")))
end
""")
    return script


def wrk(port: int, script: Path, *, connections: int, seconds: float) -> Slice:
    """Send requests at full speed for whole seconds: wrk takes no others."""
    text = subprocess.run(
        ["taskset", "-c", LOAD_CORE, program("wrk"), "-t1", f"-c{connections}",
         f"-d{max(1, round(seconds))}s", "-s", str(script), f"http://127.0.0.1:{port}"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = json.loads(text.splitlines()[-1])
    return Slice(**(found | {"micros": Counter(dict(found["micros"]))}))


def take(report: Report, name: str, slices: list[Slice], *, is_ours: bool) -> None:
    """Add a series from its histogram."""
    micros = sum((one.micros for one in slices), Counter[int]())
    tried = sum(one.answers + one.lost for one in slices)
    failed = sum(one.refused + one.lost for one in slices)
    if failed >= tried:
        report.spread(name, [], failed=max(1, failed), is_ours=is_ours)
        return
    summary = {"n": tried, "success": round(1 - failed / tried, 4)}
    summary |= {key: figure_of(_at(micros, share) / 1e3) for key, share in SHARES.items()}
    summary["max_ms"] = figure_of(max(micros) / 1e3)
    report.figures[name] = summary
    report.note(f"{name}: {summary}")


def _at(micros: Counter[int], share: float) -> int:
    """Return a percentile of a histogram."""
    left = share * micros.total()
    for value in sorted(micros):
        left -= micros[value]
        if left <= 0:
            return value
    return max(micros)


def calm(port: int, seconds: float) -> tuple[list[float], int]:
    """Latency at a rate far from saturation, over 64 connections, and the failures."""
    name = sandbox_id(0)
    request = (
        f"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {name}\r\n"
        f"E2b-Sandbox-Port: 49983\r\nX-Access-Token: {SEED.access_token(name)}\r\n\r\n"
    )
    done = subprocess.run(
        ["taskset", "-c", LOAD_CORE, sys.executable, PARTS, "load", str(port), str(RATE),
         f"{seconds:g}", request],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return found["samples"], found["failed"]


def cpu_seconds(target: Target) -> float:
    """Return the CPU time of a proxy, workers included."""
    return sum(map(_cpu_seconds, _tree(target.running.pid))) if target.running else 0.0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tree(pid: int) -> list[int]:
    found = [pid]
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += _tree(int(child))
    return found
