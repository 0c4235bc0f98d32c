"""Template builds: rebuilds from the cache, steps, a server that runs at once, many templates.

    python bench/templates.py [--quick] [--templates N]

Builds with E2B's SDK (`scripts/install-clients`) by the client's clock: a rebuild of which all is
cached, with its start command; a step that does nothing, beside the same command in a sandbox.
Creates sandboxes of a template whose server holds 30 MB and takes 5 s to boot, to its first answer:
restored from the stored memory, and warm from a pool, beside the warm `base` to envd's first
answer. Then many templates that share their first layers: time and disk of a further one, and
lists and warm claims with them beside those with one. Needs root; starts an installation of its
own.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

from reporting import ROOT, Report, at

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Installation  # noqa: E402
from tests.runtime.local.nodes import eventually  # noqa: E402
from tests.sdk.clients import CACHE, NEWEST  # noqa: E402

CLIENT = ROOT / "bench" / "clients" / "template_builds.py"
SDK = CACHE / f"e2b-{NEWEST}" / "bin" / "python"
PORT = 8000
SERVER = (
    "import http.server, os, time; data = os.urandom(30 << 20); time.sleep(5); "
    f"http.server.HTTPServer(('', {PORT}), http.server.SimpleHTTPRequestHandler).serve_forever()"
)
START = f'cd /usr/share && python3 -c "{SERVER}"'
READY = (
    f"python3 -c \"import urllib.request as r; r.urlopen('http://localhost:{PORT}')\" 2>/dev/null"
)
POOLS = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools"
SHARED_STEPS = 3
WARM = 4


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--templates", type=int, default=500, help="how many share layers")


async def sdk(paddock: Installation, name: str, count: int, steps: int, *more: str) -> list[float]:
    """Build with the SDK; return the seconds of each build."""
    start, ready, forced = (*more, "", "", "no")[:3] if more else ("", "", "no")
    words = [name, str(count), str(steps), start, ready, forced]
    process = await asyncio.create_subprocess_exec(
        SDK,
        CLIENT,
        *words,
        env=os.environ | {"E2B_API_URL": paddock.url, "E2B_API_KEY": paddock.secrets.api_key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-800:]
    return json.loads(out)


async def build(paddock: Installation, name: str, steps: list[str]) -> None:
    """Build by the API, without the 200 ms between two calls of an SDK."""
    made = await paddock.api("POST", "/v3/templates", {"name": name, "memoryMB": 512})
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    body = {"fromImage": "base", "steps": [{"type": "RUN", "args": [step]} for step in steps]}
    await paddock.api("POST", f"/v2{path}", body)

    async def ended() -> bool:
        status = await paddock.api("GET", f"{path}/status")
        assert status["status"] != "error", status
        return status["status"] == "ready"

    await eventually(ended, seconds=60)


async def first_answer(paddock: Installation, template: str, port: int, path: str) -> float:
    """Return the seconds from the call to create until the port answers."""
    began = time.perf_counter()
    box = await paddock.create(templateID=template, timeout=60)
    while (await paddock.call(box, port, path))[0] not in (200, 204):
        await asyncio.sleep(0.002)
    took = time.perf_counter() - began
    await paddock.api("DELETE", f"/sandboxes/{box.id}")
    return took


async def pool(paddock: Installation, template: str, size: int) -> None:
    """Keep warm sandboxes of a template."""
    body = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxPool",
        "metadata": {"name": f"{template}-warm"},
        "spec": {"templateRef": {"name": template}, "replicas": size},
    }
    await paddock.kube("POST", POOLS, body)
    await filled(paddock, f"{template}-warm", size)


async def filled(paddock: Installation, name: str, size: int) -> None:
    """Wait until a pool is full."""

    async def full() -> bool:
        found = await paddock.kube("GET", f"{POOLS}/{name}")
        return found.get("status", {}).get("available", 0) >= size

    await eventually(full, seconds=120)


async def warm_answers(
    paddock: Installation, name: str, template: str, port: int, path: str, count: int
) -> list[float]:
    """Return the times of creates, one by one, from a full pool."""
    times: list[float] = []
    for _ in range(count):
        await filled(paddock, name, WARM)
        times.append(await first_answer(paddock, template, port, path))
    return times


async def measure_builds(report: Report, paddock: Installation) -> None:
    count = 3 if report.is_quick else 20
    first, *rebuilds = await sdk(paddock, "server", count + 1, 3, START, READY, "no")
    report.figure("first_build_s", first)
    report.spread("cached_rebuild", rebuilds)
    steps = 20
    few, many = [
        sorted(await sdk(paddock, "steps", 3, number, "", "", "yes"))[1]
        for number in (1, steps + 1)
    ]
    box = await paddock.create(timeout=60)
    commands: list[float] = []
    for _ in range(50):
        began = time.perf_counter()
        await paddock.run(box, "true")
        commands.append(time.perf_counter() - began)
    await paddock.api("DELETE", f"/sandboxes/{box.id}")
    report.spread("command_alone", commands)
    alone = at(sorted(commands), 0.5)
    report.figure("step_ms", (many - few) / steps * 1e3, f"mean of {steps} steps, median of 3")
    report.figure("step_over_command_ms", ((many - few) / steps - alone) * 1e3, "difference")


async def measure_server(report: Report, paddock: Installation) -> None:
    count = 5 if report.is_quick else 30
    report.spread(
        "server_restored", [await first_answer(paddock, "server", PORT, "/") for _ in range(count)]
    )
    report.spread("base_warm", await warm_answers(paddock, "base", "base", 49983, "/health", count))
    await pool(paddock, "server", WARM)
    report.spread(
        "server_warm", await warm_answers(paddock, "server-warm", "server", PORT, "/", count)
    )
    report.ratio("server_warm_to_base_warm", "server_warm", "base_warm")


async def stored(paddock: Installation) -> int:
    """Return the stored bytes of all layers and results."""
    path = "/apis/paddock.dev/v1alpha1/checkpoints?labelSelector=paddock.dev/template-layer"
    items = (await paddock.kube("GET", path))["items"]
    return sum(item["status"].get("sizeBytes", 0) for item in items)


async def timed(count: int, call: Any) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return times


async def measure_many(report: Report, paddock: Installation, wanted: int) -> None:
    shared = [f"echo {number} > ~/shared-{number}" for number in range(SHARED_STEPS)]
    count = 10 if report.is_quick else 50

    async def page() -> None:
        await paddock.api("GET", "/v2/templates?limit=100")

    async def claims(name: str) -> None:
        times = await warm_answers(paddock, "base", "base", 49983, "/health", count)
        report.spread(name, times)

    await build(paddock, "task-0", [*shared, "echo 0 > ~/task"])
    report.spread("list_with_few", await timed(count, page))
    await claims("warm_claim_with_few")
    disk = await stored(paddock)
    times: list[float] = []
    for number in range(1, wanted):
        began = time.perf_counter()
        await build(paddock, f"task-{number}", [*shared, f"echo {number} > ~/task"])
        times.append(time.perf_counter() - began)
    grown = await stored(paddock) - disk
    report.spread("further_template", times)
    report.figure("disk_per_template_kib", grown / len(times) / 1024, f"mean of {len(times)}")
    report.spread("list_with_many", await timed(count, page))
    await claims("warm_claim_with_many")
    report.ratio("warm_claim_many_to_few", "warm_claim_with_many", "warm_claim_with_few")
    report.ratio("list_100_of_many_to_few", "list_with_many", "list_with_few")


async def main() -> None:
    report = Report("templates", __doc__, options)
    wanted = 20 if report.is_quick else report.given.templates
    async with Installation(pool_size=WARM, cold_creates_per_second=1000) as paddock:
        if SDK.exists():
            await measure_builds(report, paddock)
            await measure_server(report, paddock)
        else:
            report.absent("sdk", "E2B's SDK is not installed: run scripts/install-clients")
        await measure_many(report, paddock, wanted)
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
