"""Density: the cost of an idle sandbox, pooled and claimed, and how many fit.

    python bench/density.py [--quick]

Memory is what the kernel says is no longer available, divided: it counts page tables, network
namespaces and everything else that a process list does not show. It is held against the mean of
before and after, since others' page cache comes and goes meanwhile. Beside it: one `sleep` each as
a bare process, in bubblewrap, crun, podman and through OpenSandbox's server, so many of each that
all of them together weigh more than what the machine does besides. Needs root; starts an
installation of its own.
"""

import asyncio
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any

import floors
import opensandbox
from counting import writes
from floors import AbsentError
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Installation  # noqa: E402

TIMES = 1 if "--quick" in sys.argv else 5
AGAIN = 4
"""Extra measurements if the machine was too busy."""
SHARES = {"bare_exec": 2.0, "bwrap": 2.0, "crun": 2.0, "podman": 0.2}
"""Number of light processes per sandbox of ours."""
POOL = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"


def available_mb() -> float:
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) / 1e3


async def settled_mb() -> float:
    """Wait until memory is stable, then return what is available."""
    before = available_mb()
    for _ in range(6 if "--quick" in sys.argv else 10):
        await asyncio.sleep(0.5)
        now = available_mb()
        if abs(now - before) < 1:
            return now
        before = now
    return before


def weigh(report: Report, name: str, megabytes: Sequence[float], how: str) -> None:
    """Add a weight, unless other processes freed more than was used."""
    if (middle := statistics.median(megabytes)) > 0:
        report.figure(name, middle, how)
    else:
        report.missing[name] = "the machine was too busy to tell; measure on a quiet one"


@contextlib.contextmanager
def made_by(server: opensandbox.Server, count: int) -> Generator[None]:
    made: list[str] = []
    try:
        for _ in range(count):
            made.append(server.create())
        yield
        for one in made:
            server.delete(one)
    except OSError as error:
        raise AbsentError(f"{len(made)} of {count} were made: {error}") from error


async def others(report: Report, count: int) -> None:
    """Measure the memory of sleepers in every alternative."""
    for name, share in SHARES.items():
        number = max(4, int(count * share))
        await weigh_while(
            report, f"{name}_sleep_mb", functools.partial(floors.held, name, number), number
        )
    number = max(4, int(count * SHARES["podman"]))
    try:
        with opensandbox.serving(report) as server:
            await weigh_while(
                report,
                "opensandbox_sleep_mb",
                functools.partial(made_by, server, number),
                number,
                times=1,  # It refuses to create sandboxes right after deletions.
            )
    except AbsentError as error:
        report.absent("opensandbox_sleep_mb", str(error))


async def weigh_while(
    report: Report,
    name: str,
    kept: Callable[[], contextlib.AbstractContextManager[None]],
    count: int,
    times: int = TIMES,
) -> None:
    """Measure a few times, and again where the result was unusable."""
    weights: list[float] = []
    try:
        before = await settled_mb()
        while len(weights) < times or (
            statistics.median(weights) <= 0 and len(weights) < times + AGAIN
        ):
            with kept():
                held = await settled_mb()
            after = await settled_mb()
            weights.append(((before + after) / 2 - held) / count)
            before = after
    except AbsentError as error:
        report.absent(name, str(error))
    else:
        weigh(report, name, weights, f"mean of {count}, median of {len(weights)}")


async def main() -> None:
    report = Report("density", __doc__)
    count = 24 if report.is_quick else 300
    await others(report, min(count, 100))
    async with Installation(pool_size=0, gateways=1, cold_creates_per_second=1000) as paddock:
        await await_first(paddock)
        before = await settled_mb()
        began, written = time.perf_counter(), await writes(paddock)
        body = {"spec": {"replicas": count}}
        await paddock.kube("PATCH", POOL, body, kind="application/merge-patch+json")
        await paddock.stocked(count)
        wall = time.perf_counter() - began
        report.figure("pooled_per_second", count / wall, f"one run of {count}")
        report.writes("pooled_sandbox", await writes(paddock) - written, count)
        pooled = await settled_mb()
        report.figure("pooled_sandboxes", count)
        weigh(report, "pooled_mb_each", [(before - pooled) / count], f"mean of {count}")
        await claimed(paddock, report, count // 2, before)
    for name in (*floors.ALTERNATIVES, "opensandbox"):
        report.ratio(f"pooled_to_{name}_sleep", "pooled_mb_each", f"{name}_sleep_mb")
    report.finish()


async def claimed(paddock: Installation, report: Report, count: int, before: float) -> None:
    """Claim this many at once, drop the rest of the pool, use them all, pause them all."""
    written = await writes(paddock)
    creates = [paddock.create(timeout=3600) for _ in range(count)]
    boxes = await taken(report, f"claim_of_{count}_at_once", creates)
    # Refilling the pool writes, too.
    report.writes("claim_and_refill", await writes(paddock) - written, count)
    body = {"spec": {"replicas": 0}}
    await paddock.kube("PATCH", POOL, body, kind="application/merge-patch+json")
    said = await taken(report, "first_command", [paddock.run(box, "echo here") for box in boxes])
    report.figure("claimed_answering", said.count("here\n") / count, f"of {count}")
    while (await paddock.kube("GET", POOL)).get("status", {}).get("available", 0):
        await asyncio.sleep(0.2)
    await settled_mb()
    written = await writes(paddock)
    pauses: list[float] = []
    for box in boxes:
        with report.trying("a pause"):
            began = time.perf_counter()
            await paddock.api("POST", f"/sandboxes/{box.id}/pause")
            pauses.append(time.perf_counter() - began)
    report.spread("pause", pauses, failed=len(boxes) - len(pauses))
    report.writes("pause", await writes(paddock) - written, len(boxes))
    weight = (before - await settled_mb()) / len(boxes)
    weigh(report, "paused_mb_each", [weight], f"mean of {len(boxes)}")
    for box in boxes:
        await paddock.api("DELETE", f"/sandboxes/{box.id}")


async def taken(report: Report, name: str, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Make concurrent calls; record their times, return the successes."""
    samples: list[float] = []

    async def one(call: Coroutine[Any, Any, Any]) -> Any:
        began = time.perf_counter()
        result = await call
        samples.append(time.perf_counter() - began)
        return result

    results = await asyncio.gather(*map(one, calls), return_exceptions=True)
    well = [item for item in results if not isinstance(item, BaseException)]
    report.spread(name, samples, failed=len(calls) - len(well))
    return well


async def await_first(paddock: Installation) -> None:
    """Create and delete one: one-time costs are not counted."""
    box = await paddock.create(timeout=60)
    await paddock.run(box, "echo here")
    await paddock.api("DELETE", f"/sandboxes/{box.id}")


if __name__ == "__main__":
    asyncio.run(main())
