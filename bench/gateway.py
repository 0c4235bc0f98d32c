"""The gateway beside nginx, HAProxy and Envoy, in front of the same upstream.

    python bench/gateway.py [--quick] [--seconds 20] [--only PART] [--no-sandboxes]

One run: load and upstream on one core, the proxies on the other, called in turn, so that whatever
else the machine does hits all of them alike. `..._full` is the latency with 64 connections that ask
as fast as they can (`..._full_256` with 256), `..._calm` that of 1,000 requests a second,
`..._stream` that of 16 MB over 8 connections; the floor (`direct`) is the upstream without a proxy.
What proxies do writes nothing; waking a sandbox does. Needs nginx (it is the upstream), wrk, and
root for sandboxes; best on an idle machine.
"""

import asyncio
import contextlib
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from counting import writes
from floors import AbsentError
from gateway_load import (
    LOAD_CORE,
    PARTS,
    PROXY_CORE,
    Slice,
    Target,
    calm,
    cpu_seconds,
    lua,
    process,
    take,
    wrk,
)
from gateway_parts import ROUTES, SEED, route, sandbox_id
from gateway_rivals import envoy, forwarding, haproxy, nginx
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Installation  # noqa: E402
from tests.ports import free_ports  # noqa: E402

from paddock.gateway.routing.peers import GatewayPeers  # noqa: E402
from paddock.kit import clock as clocks  # noqa: E402

STREAM_MB = 16
TURNS = 5
RIVALS = ("direct", "nginx", "haproxy", "envoy")
ROUTES_BEFORE, ROUTES_TOLD = 20, 100
"""Routes that are announced before and during the timing."""
_, MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
IDLE_SOCKETS = min(10_000, (MOST_FILES - 400) // 2)
"""A gateway needs two descriptors for each; with fewer, the rest is extrapolated."""


def ours(port: int, admin_port: int, upstream: int) -> list[str]:
    return [sys.executable, PARTS, "serve", str(port), str(admin_port), str(upstream)]


def proxies(report: Report, directory: Path, seconds: float) -> None:
    """Put the same load on all of them in turn."""
    upstream, admin_port, *ports = free_ports(6)
    big = directory / "www"
    big.mkdir(mode=0o755)
    (big / "big").write_bytes(os.urandom(1 << 20) * STREAM_MB)
    # The owner is root; its worker must be able to read the file.
    serving = nginx(
        directory, upstream,
        f"|||location / {{ return 200 'ok'; }} location /big {{ root {big}; }}", "upstream",
    )  # fmt: skip
    starts: dict[str, Callable[[int], list[str]]] = {
        "paddock": lambda port: ours(port, admin_port, upstream),
        "haproxy": lambda port: haproxy(directory, port, upstream),
        "nginx": lambda port: forwarding(directory, port, upstream),
        "envoy": lambda port: envoy(directory, port, upstream),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(serving, upstream, LOAD_CORE))
        targets = {"direct": Target(upstream, None)}
        for (name, start), port in zip(starts.items(), ports, strict=True):
            try:
                running = stack.enter_context(process(start(port), port, PROXY_CORE))
            except AbsentError as error:
                report.absent(name, str(error))
            else:
                targets[name] = Target(port, running)
        in_turn(report, directory, targets, seconds)
    for other in RIVALS:
        for what in ("rps", "rps_256", "stream_mb_per_s", "calm", "full"):
            report.ratio(f"{what}_to_{other}", f"paddock_{what}", f"{other}_{what}")
        for what in ("calm", "full"):
            name = f"{what}_to_{other}_at_p99"
            report.ratio(name, f"paddock_{what}", f"{other}_{what}", key="p99_ms")


def in_turn(report: Report, directory: Path, targets: dict[str, Target], seconds: float) -> None:
    small, large = lua(directory, "/"), lua(directory, "/big")
    turns = 1 if report.is_quick else TURNS
    each = seconds / turns
    half = max(1, round(each / 2))
    quiet: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    busy: dict[str, dict[str, list[Slice]]] = {name: defaultdict(list) for name in targets}
    used: dict[str, float] = defaultdict(float)
    for target in targets.values():
        wrk(target.port, small, connections=64, seconds=half)
    for number in range(turns):
        report.note(f"turn {number + 1} of {turns}")
        for name, target in targets.items() if number % 2 == 0 else reversed(targets.items()):
            samples, wrong = calm(target.port, each)
            quiet[name] += samples
            failed[name] += wrong
            before = cpu_seconds(target)
            busy[name]["full"].append(wrk(target.port, small, connections=64, seconds=half))
            used[name] += cpu_seconds(target) - before
            many = wrk(target.port, small, connections=256, seconds=half)
            busy[name]["full_256"].append(many)
            busy[name]["stream"].append(wrk(target.port, large, connections=8, seconds=half))
    how = f"median of {turns} runs of {half} s"
    for name, target in targets.items():
        is_ours = name == "paddock"
        report.spread(f"{name}_calm", quiet[name], failed=failed[name], is_ours=is_ours)
        for what, slices in busy[name].items():
            take(report, f"{name}_{what}", slices, is_ours=is_ours)
        full, many, streamed = busy[name].values()
        report.figure(f"{name}_rps", median(one.rps for one in full), how)
        report.figure(f"{name}_rps_256", median(one.rps for one in many), how)
        report.figure(f"{name}_stream_mb_per_s", median(one.mb_per_s for one in streamed), how)
        if target.running:
            answers = sum(one.answers for one in full)
            cost = used[name] / max(answers, 1) * 1e6
            report.figure(f"{name}_us_cpu_per_request", cost, f"mean of {answers:,}")


def pairwise(report: Report, directory: Path, rounds: int) -> None:
    """Ours and HAProxy in turn, one second each, with equal and with unique heads."""
    upstream, port, admin_port, other = free_ports(4)
    serving = nginx(directory, upstream, "|||location / { return 200 'ok'; }", "pairwise")
    with (
        process(serving, upstream, LOAD_CORE),
        process(ours(port, admin_port, upstream), port, PROXY_CORE) as us,
        process(haproxy(directory, other, upstream), other, PROXY_CORE) as them,
    ):

        def slice_of(target: Target, script: Path) -> tuple[float, float]:
            before = cpu_seconds(target)
            rps = wrk(target.port, script, connections=64, seconds=1).rps
            return rps, (cpu_seconds(target) - before) / rps

        for name, is_unique in (("alike", False), ("unique", True)):
            script = lua(directory, "/", is_unique=is_unique)
            both = (Target(port, us), Target(other, them))
            for target in both:
                slice_of(target, script)
            rates, costs = [], []
            for _ in range(rounds):
                (our_rps, our_cpu), (their_rps, their_cpu) = (
                    slice_of(target, script) for target in both
                )
                rates.append(our_rps / their_rps)
                costs.append(their_cpu / our_cpu)
            report.ratios[f"rps_to_haproxy_in_turn_{name}"] = round(median(rates), 3)
            report.ratios[f"per_core_to_haproxy_in_turn_{name}"] = round(median(costs), 3)
    report.note(f"in turn with HAProxy: {report.ratios}")


async def idle_sockets(report: Report) -> None:
    """Memory of a gateway with 10,000 idle WebSockets."""
    port, admin_port, upstream = free_ports(3)
    with (
        process([sys.executable, PARTS, "sockets", str(upstream)], upstream, LOAD_CORE),
        process(ours(port, admin_port, upstream), port, PROXY_CORE) as gateway,
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
        report.figure("idle_socket_kb_each", each * 1024, f"mean of {len(opened):,}")
        report.figure("rss_mb_at_10000_idle_sockets", before + each * 10_000, "reckoned")


def rss_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", text)
    assert found
    return int(found[1]) / 1024


async def route_update(report: Report) -> None:
    """From the announcement of a route to the first answer over it."""
    port, admin_port, upstream = free_ports(3)
    samples: list[float] = []
    with (
        process([sys.executable, PARTS, "sockets", str(upstream)], upstream, LOAD_CORE),
        process(ours(port, admin_port, upstream), port, PROXY_CORE),
    ):
        peers = GatewayPeers(SEED, clocks.system())
        peers.set_urls([f"http://127.0.0.1:{admin_port}"])
        for number in range(ROUTES_BEFORE + ROUTES_TOLD):
            new = ROUTES + 1 + number
            with report.trying("telling a route"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                started = time.perf_counter()
                assert await peers.send([route(new)]) == 1
                took = time.perf_counter() - started
                writer.write(
                    f"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {sandbox_id(new)}\r\n"
                    f"E2b-Sandbox-Port: {upstream}\r\n"
                    "Connection: Upgrade\r\nUpgrade: x\r\n\r\n".encode()
                )
                assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
                writer.transport.abort()
                if number >= ROUTES_BEFORE:
                    samples.append(took)
        peers.close()
    report.spread("route_update", samples, failed=ROUTES_TOLD - len(samples))


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
    """Extra latency of a request because its sandbox was paused."""
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
                    with report.trying(f"a request, {strategy}"):
                        if pauses:
                            await paddock.api("POST", f"/sandboxes/{box.id}/pause")
                        started = time.perf_counter()
                        status, _ = await paddock.call(box, 8000)
                        assert status == 200
                        samples.append(time.perf_counter() - started)
            label = strategy.lower()
            report.writes(f"{label}_pause_and_wake", await writes(paddock) - before, rounds)
            report.spread(f"{label}_awake", awake, failed=rounds - len(awake))
            report.spread(f"{label}_asleep", asleep, failed=rounds - len(asleep))
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
    parser.add_argument("--seconds", type=float, default=20, help="of calm load, each")
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
    for needed in ("nginx", "wrk"):
        if shutil.which(needed) is None:
            raise SystemExit(f"this needs {needed}: scripts/install-rivals")
    directory = Path(tempfile.mkdtemp(prefix="pdbench"))
    directory.chmod(0o755)
    try:
        if "proxies" in parts:
            proxies(report, directory, seconds)
            with contextlib.suppress(AbsentError):  # Its absence was reported before.
                pairwise(report, directory, 1 if report.is_quick else 6)
        if "sockets" in parts:
            asyncio.run(idle_sockets(report))
        if "routes" in parts:
            asyncio.run(route_update(report))
        if "wake" in parts:
            asyncio.run(waking(report, 30))
    finally:
        shutil.rmtree(directory)
    report.finish()


if __name__ == "__main__":
    main()
