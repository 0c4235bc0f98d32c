"""The gateway beside nginx, HAProxy and Envoy, in front of the same upstream.

    python bench/gateway.py [--quick] [--seconds 5] [--only PART] [--no-sandboxes]

One run: load and upstream on one core, the proxy on the other. `..._full` is the latency with 64
connections that ask as fast as they can, `..._calm` that of 1,000 requests a second; the floor
(`direct`) is the upstream without a proxy. What proxies do writes nothing; waking a sandbox does.
Needs nginx (it is the upstream), wrk, and root for sandboxes; best on an idle machine.
"""

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from counting import writes
from gateway_parts import ROUTES, SEED, route, sandbox_id
from gateway_rivals import envoy, haproxy, nginx
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Installation  # noqa: E402
from tests.ports import free_ports  # noqa: E402

from paddock.gateway.peers import Peers  # noqa: E402
from paddock.kit import clock as clocks  # noqa: E402

LOAD_CORE, PROXY_CORE = "0", str((os.cpu_count() or 1) - 1)
CALLED = 64
STREAM_MB = 64
_, MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
IDLE_SOCKETS = min(10_000, (MOST_FILES - 400) // 2)
"""A gateway needs two descriptors for each; where fewer are allowed, the rest is reckoned."""
PARTS = str(Path(__file__).with_name("gateway_parts.py"))


@contextlib.contextmanager
def process(command: list[str], port: int | None, core: str) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(
        ["taskset", "-c", core, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert started.stderr is not None
    try:
        deadline = time.monotonic() + 20
        while port is not None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start: {started.stderr.read()[-500:]!r}")
            time.sleep(0.05)
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        started.stderr.close()


def lua(directory: Path, path: str, *, is_unique: bool = False) -> Path:
    """A load that calls 64 sandboxes in turn, with their tokens; perhaps never twice alike."""
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
  local bad = summary.errors
  io.write(string.format(
    '{{"seconds":%.6f,"requests":%d,"bytes":%d,"failed":%d,"p50":%d,"p95":%d,"p99":%d,"max":%d}}\\n',
    summary.duration / 1e6, summary.requests, summary.bytes,
    bad.connect + bad.read + bad.write + bad.status + bad.timeout,
    latency:percentile(50), latency:percentile(95), latency:percentile(99), latency.max))
end
""")
    return script


def wrk(port: int, script: Path, *, connections: int, seconds: float) -> dict[str, float]:
    """Ask as fast as it goes; gives the rates, and the latency in microseconds."""
    text = subprocess.run(
        ["taskset", "-c", LOAD_CORE, "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s",
         "-s", str(script), f"http://127.0.0.1:{port}"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    found["rps"] = found["requests"] / found["seconds"]
    found["mb_per_s"] = found["bytes"] / found["seconds"] / 1e6
    return found


def take_wrk(report: Report, name: str, found: dict[str, float]) -> None:
    """Take in a series of which only the summary is known."""
    tried = int(found["requests"])
    summary = {"n": tried, "success": round(1 - found["failed"] / max(tried, 1), 4)}
    summary |= {f"{key}_ms": found[key] / 1e3 for key in ("p50", "p95", "p99", "max")}
    report.figures[name] = summary
    report.note(f"{name}: {summary}")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    found = [pid]
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += tree(int(child))
    return found


def steady(port: int, seconds: float) -> tuple[list[float], int]:
    """Latency at a rate far from saturation, over 64 connections."""
    name = sandbox_id(0)
    request = (
        f"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {name}\r\n"
        f"E2b-Sandbox-Port: 49983\r\nX-Access-Token: {SEED.access_token(name)}\r\n\r\n"
    )
    done = subprocess.run(
        ["taskset", "-c", LOAD_CORE, sys.executable, PARTS, "load", str(port), "1000",
         f"{seconds:g}", request],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return found["samples"], found["failed"]


def proxies(report: Report, directory: Path, seconds: float) -> None:
    upstream, port, admin_port = free_ports(3)
    big = directory / "www"
    big.mkdir(mode=0o755)
    directory.chmod(0o755)
    (big / "big").write_bytes(os.urandom(1 << 20) * STREAM_MB)
    # The owner may be root only here; its worker must read the file.
    serving = nginx(
        directory, upstream,
        f"|||location / {{ return 200 'ok'; }} location /big {{ root {big}; }}", "upstream",
    )  # fmt: skip
    small, large = lua(directory, "/"), lua(directory, "/big")
    kept = f"upstream u {{ server 127.0.0.1:{upstream}; keepalive 512; "
    kept += "keepalive_requests 1000000000; }"
    passing = "location / { proxy_pass http://u; proxy_http_version 1.1; "
    passing += 'proxy_set_header Connection ""; proxy_buffering off; }'
    commands: dict[str, list[str] | None] = {
        "direct": None,
        "paddock": [sys.executable, PARTS, "serve", str(port), str(admin_port), str(upstream)],
        "haproxy": haproxy(directory, port, upstream) if shutil.which("haproxy") else [],
        "nginx": nginx(directory, port, f"{kept}|||{passing}", "proxy"),
        "envoy": envoy(directory, port, upstream) or [],
    }
    with process(serving, upstream, LOAD_CORE):
        for name, command in commands.items():
            if command == []:
                report.absent(name, "not installed")
                continue
            context = (
                contextlib.nullcontext() if command is None else process(command, port, PROXY_CORE)
            )
            with context as running:
                at = upstream if command is None else port
                wrk(at, small, connections=64, seconds=min(seconds, 2))
                before = sum(map(cpu_seconds, tree(running.pid))) if running else 0.0
                found = wrk(at, small, connections=64, seconds=seconds)
                take_wrk(report, f"{name}_full", found)
                report.figure(f"{name}_rps", found["rps"])
                if running:
                    used = sum(map(cpu_seconds, tree(running.pid))) - before
                    micros = used / max(found["requests"], 1) * 1e6
                    report.figure(f"{name}_us_cpu_per_request", micros)
                many = wrk(at, small, connections=256, seconds=seconds)
                report.figure(f"{name}_rps_256", many["rps"])
                calm, failed = steady(at, seconds)
                report.spread(f"{name}_calm", calm, failed=failed)
                streamed = wrk(at, large, connections=8, seconds=seconds)
                report.figure(f"{name}_stream_mb_per_s", streamed["mb_per_s"])
    for other in ("direct", "nginx", "haproxy", "envoy"):
        for what in ("rps", "stream_mb_per_s", "calm", "full"):
            report.ratio(f"{what}_to_{other}", f"paddock_{what}", f"{other}_{what}")


def pairwise(report: Report, directory: Path, rounds: int) -> None:
    """Ours and HAProxy in turn, a second each: what the machine does besides hits both alike."""
    upstream, port, admin_port, other = free_ports(4)
    serving = nginx(directory, upstream, "|||location / { return 200 'ok'; }", "pairwise")
    ours_command = [sys.executable, PARTS, "serve", str(port), str(admin_port), str(upstream)]
    with (
        process(serving, upstream, LOAD_CORE),
        process(ours_command, port, PROXY_CORE) as ours,
        process(haproxy(directory, other, upstream), other, PROXY_CORE) as theirs,
    ):

        def slice_of(
            running: subprocess.Popen[bytes], at: int, script: Path
        ) -> tuple[float, float]:
            before = sum(map(cpu_seconds, tree(running.pid)))
            rps = wrk(at, script, connections=64, seconds=1)["rps"]
            return rps, (sum(map(cpu_seconds, tree(running.pid))) - before) / rps

        for name, is_unique in (("alike", False), ("unique", True)):
            script = lua(directory, "/", is_unique=is_unique)
            slice_of(ours, port, script)
            slice_of(theirs, other, script)
            rates, costs = [], []
            for _ in range(rounds):
                (our_rps, our_cpu), (their_rps, their_cpu) = (
                    slice_of(ours, port, script),
                    slice_of(theirs, other, script),
                )
                rates.append(our_rps / their_rps)
                costs.append(their_cpu / our_cpu)
            report.ratios[f"rps_to_haproxy_in_turn_{name}"] = round(median(rates), 3)
            report.ratios[f"per_core_to_haproxy_in_turn_{name}"] = round(median(costs), 3)
    report.note(f"in turn with HAProxy: {report.ratios}")


async def idle_sockets(report: Report) -> None:
    """Memory of a gateway with 10,000 WebSockets on which nothing happens."""
    port, admin_port, upstream = free_ports(3)
    serving = [sys.executable, PARTS, "serve", str(port), str(admin_port), str(upstream)]
    with (
        process([sys.executable, PARTS, "sockets", str(upstream)], upstream, LOAD_CORE),
        process(serving, port, PROXY_CORE) as gateway,
    ):
        request = (
            f"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {sandbox_id(0)}\r\n"
            f"E2b-Sandbox-Port: {upstream}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        ).encode()
        before = rss_mb(gateway.pid)
        opened: list[asyncio.StreamWriter] = []

        async def open_one(number: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            writer.write(request.replace(b"00000000", b"%08d" % (number % 100), 1))
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 101 " in answer, answer

        for start in range(0, IDLE_SOCKETS, 200):
            wave = range(start, min(start + 200, IDLE_SOCKETS))
            await asyncio.gather(*(open_one(number) for number in wave))
        held = rss_mb(gateway.pid)
        for writer in opened:
            writer.transport.abort()
        each = (held - before) / len(opened)
        report.figure("idle_sockets", len(opened))
        report.figure("idle_sockets_rss_mb", held)
        report.figure("idle_socket_kb_each", each * 1024)
        report.figure("rss_mb_at_10000_idle_sockets", before + each * 10_000)


def rss_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", text)
    assert found
    return int(found[1]) / 1024


async def route_update(report: Report) -> None:
    """From the moment a route is told to the first answer over it."""
    port, admin_port, upstream = free_ports(3)
    samples: list[float] = []
    serving = [sys.executable, PARTS, "serve", str(port), str(admin_port), str(upstream)]
    with (
        process([sys.executable, PARTS, "sockets", str(upstream)], upstream, LOAD_CORE),
        process(serving, port, PROXY_CORE),
    ):
        peers = Peers(SEED, clocks.system())
        peers.set([f"http://127.0.0.1:{admin_port}"])
        for number in range(120):
            new = ROUTES + 1 + number
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            started = time.perf_counter()
            assert await peers.tell([route(new)]) == 1
            samples.append(time.perf_counter() - started)
            writer.write(
                f"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {sandbox_id(new)}\r\n"
                f"E2b-Sandbox-Port: {upstream}\r\n"
                "Connection: Upgrade\r\nUpgrade: x\r\n\r\n".encode()
            )
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
        peers.close()
    report.spread("route_update", samples[20:])


SERVER = """
import http.server, sys
ballast = bytearray(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
for at in range(0, len(ballast), 4096): ballast[at] = at % 255 + 1
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def waking(report: Report, rounds: int) -> None:
    """What a caller waits longer because its sandbox was paused."""
    async with Installation(gateways=1) as paddock:
        for strategy in ("Freeze", "Hibernate"):
            box = await paddock.create(timeout=3600, autoPause=True, autoResume={"enabled": True})
            await paddock.serve_inside(box, 8000, SERVER.replace("sys.argv[2]", "20_000_000")
                                       .replace("if len(sys.argv) > 2 else 0", ""))  # fmt: skip
            await set_strategy(paddock, box.id, strategy)
            awake, asleep = [], []
            before = await writes(paddock)
            for _ in range(rounds):
                for samples, pauses in ((awake, False), (asleep, True)):
                    if pauses:
                        await paddock.api("POST", f"/sandboxes/{box.id}/pause")
                    started = time.perf_counter()
                    status, _ = await paddock.call(box, 8000)
                    assert status == 200
                    samples.append(time.perf_counter() - started)
            label = strategy.lower()
            report.writes(f"{label}_pause_and_wake", await writes(paddock) - before, rounds)
            report.spread(f"{label}_awake", awake)
            report.spread(f"{label}_asleep", asleep)
            report.ratio(f"{label}_asleep_to_awake", f"{label}_asleep", f"{label}_awake")
            await paddock.api("DELETE", f"/sandboxes/{box.id}")


async def set_strategy(paddock: Installation, sandbox: str, strategy: str) -> None:
    base = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes"
    for item in (await paddock.kube("GET", base))["items"]:
        if item["spec"].get("claim", {}).get("sandboxId") == sandbox:
            await paddock.kube(
                "PATCH", f"{base}/{item['metadata']['name']}",
                {"spec": {"pauseStrategy": strategy}}, kind="application/merge-patch+json",
            )  # fmt: skip


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--only", choices=("proxies", "sockets", "routes", "wake"))
    parser.add_argument("--no-sandboxes", action="store_true")


def main() -> None:
    report = Report("gateway", __doc__, options)
    given = report.given
    seconds = 1.0 if report.is_quick else given.seconds
    parts = [given.only] if given.only else ["proxies", "routes"]
    if not given.only and not report.is_quick:
        parts += ["sockets"] if given.no_sandboxes else ["sockets", "wake"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
    for program in ("nginx", "wrk"):
        if shutil.which(program) is None:
            raise SystemExit(f"this needs {program}: apt-get install {program}")
    directory = Path(tempfile.mkdtemp(prefix="pdbench", dir="/tmp"))
    try:
        if "proxies" in parts:
            proxies(report, directory, seconds)
            if shutil.which("haproxy"):
                pairwise(report, directory, 1 if report.is_quick else 6)
        if "sockets" in parts:
            asyncio.run(idle_sockets(report))
        if "routes" in parts:
            asyncio.run(route_update(report))
        if "wake" in parts:
            asyncio.run(waking(report, 15))
    finally:
        shutil.rmtree(directory)
    report.finish()


if __name__ == "__main__":
    main()
