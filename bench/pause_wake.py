"""Pause and wake: through the API, and by traffic that arrives for a paused sandbox.

    python bench/pause_wake.py [--quick]

Beside it: the same request to the same server while its sandbox runs; SIGSTOP and SIGCONT of a bare
process, the floor; pausing by crun, by podman and through OpenSandbox's server. Freeze and
Hibernate are separate series, never mixed. Needs root; starts an installation of its own.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import floors
import opensandbox
from counting import writes
from floors import AbsentError
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Box, Installation  # noqa: E402

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
"""


def in_turn(
    report: Report,
    name: str,
    rounds: int,
    pause: Callable[[], object],
    resume: Callable[[], object],
) -> None:
    """Record two alternating calls."""
    samples: dict[str, list[float]] = {"pause": [], "resume": []}
    for _ in range(rounds):
        for verb, act in (("pause", pause), ("resume", resume)):
            with report.trying(f"{name}_{verb}"):
                began = time.perf_counter()
                act()
                samples[verb].append(time.perf_counter() - began)
    for verb, taken in samples.items():
        report.spread(f"{name}_{verb}", taken, failed=rounds - len(taken), is_ours=False)


def bare(report: Report, rounds: int) -> None:
    """Stop and continue one process, each until the kernel confirms it."""
    with subprocess.Popen(floors.SLEEP) as process:

        def told(number: signal.Signals, change: int) -> None:
            process.send_signal(number)
            os.waitid(os.P_PID, process.pid, change)

        in_turn(
            report,
            "bare_signal",
            rounds,
            lambda: told(signal.SIGSTOP, os.WSTOPPED),
            lambda: told(signal.SIGCONT, os.WCONTINUED),
        )
        process.kill()


def containers(report: Report, rounds: int) -> None:
    """Pause sleepers in crun and in podman with their own commands."""
    report.absent("bwrap_pause", "it has no pause")
    for name, verbs in (("crun", ("pause", "resume")), ("podman", ("pause", "unpause"))):
        alternative, _ = floors.ALTERNATIVES[name]
        try:
            with alternative() as command:
                words = command(floors.SLEEP, stays=True)
                start = words[: words.index("run")]
                if name == "podman":
                    box = floors.run(words).strip()
                else:  # A sleeper would keep a pipe open.
                    floors.quiet(words).wait()
                    box = words[-1]
                calls = [partial(floors.run, [*start, verb, box]) for verb in verbs]
                in_turn(report, name, rounds, *calls)
        except AbsentError as error:
            report.absent(f"{name}_pause", str(error))


def server(report: Report, rounds: int) -> None:
    """Pause through OpenSandbox's API."""
    try:
        with opensandbox.serving(report) as running:
            box = running.create()
            in_turn(
                report,
                "opensandbox",
                rounds,
                lambda: running.pause(box),
                lambda: running.resume(box),
            )
            running.delete(box)
    except AbsentError as error:
        report.absent("opensandbox_pause", str(error))


async def strategy(paddock: Installation, box: Box, name: str) -> None:
    page = await paddock.kube("GET", "/apis/paddock.dev/v1alpha1/sandboxes")
    found = next(item for item in page["items"] if _id(item) == box.id)
    path = (
        f"/apis/paddock.dev/v1alpha1/namespaces/{found['metadata']['namespace']}"
        f"/sandboxes/{found['metadata']['name']}"
    )
    body = {"spec": {"pauseStrategy": name}}
    await paddock.kube("PATCH", path, body, kind="application/merge-patch+json")


def _id(sandbox: dict) -> str | None:
    return sandbox["spec"].get("claim", {}).get("sandboxId")


async def timed(work) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def request(paddock: Installation, box: Box) -> None:
    status, body = await paddock.call(box, 8000, "/")
    assert (status, body) == (200, b"hello"), (status, body)


async def measure(paddock: Installation, report: Report, name: str, rounds: int) -> None:
    box = await paddock.create(timeout=3600, autoPause=True, autoResume={"enabled": True})
    await paddock.serve_inside(box, 8000, SERVER)
    await strategy(paddock, box, name)
    label = name.lower()
    pause, connect = f"/sandboxes/{box.id}/pause", f"/sandboxes/{box.id}/connect"
    running, pauses, connects, wakes = [], [], [], []
    for _ in range(rounds):
        with report.trying(f"a request, {name}"):
            running.append(await timed(request(paddock, box)))
    before = await writes(paddock)
    for _ in range(rounds):
        with report.trying(f"a pause and a connect, {name}"):
            pauses.append(await timed(paddock.api("POST", pause)))
            took = await timed(paddock.api("POST", connect, {"timeout": 3600}))
            await request(paddock, box)
            connects.append(took)
    report.writes(f"{label}_pause_and_connect", await writes(paddock) - before, rounds)
    before = await writes(paddock)
    for _ in range(rounds):
        with report.trying(f"a wake, {name}"):
            await paddock.api("POST", pause)
            wakes.append(await timed(request(paddock, box)))
    report.writes(f"{label}_pause_and_wake_by_request", await writes(paddock) - before, rounds)
    series = {"request_running": running, "pause": pauses, "connect": connects}
    for what, samples in {**series, "wake_by_request": wakes}.items():
        report.spread(f"{label}_{what}", samples, failed=rounds - len(samples))
    report.ratio(f"{label}_wake_to_running", f"{label}_wake_by_request", f"{label}_request_running")
    for other in ("bare_signal", "crun", "podman", "opensandbox"):
        report.ratio(f"{label}_pause_to_{other}", f"{label}_pause", f"{other}_pause")
        report.ratio(f"{label}_connect_to_{other}_resume", f"{label}_connect", f"{other}_resume")
    await paddock.api("DELETE", f"/sandboxes/{box.id}")


async def main() -> None:
    report = Report("pause_wake", __doc__)
    bare(report, 100)
    containers(report, 5 if report.is_quick else 20)
    server(report, 20)
    async with Installation(pool_size=2, gateways=1) as paddock:
        await measure(paddock, report, "Freeze", 20 if report.is_quick else 100)
        await measure(paddock, report, "Hibernate", 6 if report.is_quick else 100)
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
