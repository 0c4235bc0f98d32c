"""Cold starts: no pool at all, `POST /sandboxes` to the first command's output.

    python bench/cold.py [--quick]

The cold tier alone. Beside it, in the same run, what is installed: fork and exec, bubblewrap, crun,
podman, each to the output of the same command from the same image; OpenSandbox's server to the end
of its create, against ours. Needs root; starts an installation of its own.
"""

import asyncio
import sys
import time

import floors
import opensandbox
from counting import writes
from floors import ALTERNATIVES
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.installation import Installation  # noqa: E402


async def one(paddock: Installation) -> tuple[float, float]:
    """Return seconds until the sandbox is created, and until its first command has output."""
    began = time.perf_counter()
    box = await paddock.create(timeout=60)
    made = time.perf_counter() - began
    assert await paddock.run(box, "echo hello") == "hello\n"
    total = time.perf_counter() - began
    await paddock.api("DELETE", f"/sandboxes/{box.id}")
    return made, total


async def main() -> None:
    report = Report("cold", __doc__)
    count = 20 if report.is_quick else 100
    floors.measure(report, count)
    opensandbox.measure(report, 20)
    async with Installation(pool_size=0, gateways=1, cold_creates_per_second=1000) as paddock:
        for _ in range(3):
            await one(paddock)
        before = await writes(paddock)
        pairs: list[tuple[float, float]] = []
        for _ in range(count):
            with report.trying("a cold start"):
                pairs.append(await one(paddock))
        report.writes("create_and_kill", await writes(paddock) - before, count)
        failed = count - len(pairs)
        report.spread("cold_create", [made for made, _ in pairs], failed=failed)
        report.spread("cold_total", [total for _, total in pairs], failed=failed)
        together = 8 if report.is_quick else 32
        began = time.perf_counter()
        results = await asyncio.gather(
            *(one(paddock) for _ in range(together)), return_exceptions=True
        )
        wall = time.perf_counter() - began
        well = [item[1] for item in results if isinstance(item, tuple)]
        report.spread(f"cold_burst_{together}_total", well, failed=together - len(well))
        report.figure("cold_burst_per_second", len(well) / wall, f"one burst of {together}")
    report.against("cold_total", ALTERNATIVES, label="cold")
    report.against("cold_create", [opensandbox.NAME])
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
