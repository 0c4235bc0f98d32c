"""Storing and cloning live sandboxes through the API: snapshot, create from it, fork.

    python bench/hibernate_fork.py [--quick]

The sandbox holds 30 MB of memory that no page cache has, and a file that every clone must have.
The clone tier alone: neither warm nor cold starts are in these series. The floor is a copy of 30 MB
of memory; beside it are podman's checkpoints, where its CRIU runs, and what a start from nothing
(no state at all) costs in fork and exec, bubblewrap, crun and podman. Needs root; starts an
installation of its own.
"""

import asyncio
import sys
import time

import floors
from counting import writes
from floors import ALTERNATIVES, AbsentError
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import msgspec  # noqa: E402
from tests.installation import Box, Installation  # noqa: E402

HOLDER = (
    "nohup python3 -c 'import os, time; held = os.urandom(30 << 20); "
    'open("/tmp/ready", "w").write("kept"); time.sleep(10**6)\' >/dev/null 2>&1 </dev/null &'
)


def copy_floor(rounds: int) -> list[float]:
    """Copying 30 MB of memory once: less no clone can do."""
    source = bytes(30 << 20)
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        bytearray(source)
        samples.append(time.perf_counter() - began)
    return samples


def podman_checkpoint(report: Report, rounds: int) -> None:
    """Checkpoint and restore by podman of a container that only sleeps."""
    stored, restored = [], []
    try:
        with floors.podman() as command, floors.hidden() as inside:
            # One that was stored is there no more with --rm.
            started = [word for word in command(floors.SLEEP, stays=True) if word != "--rm"]
            name = floors.run(started).strip()
            for _ in range(rounds):
                for verb, samples in (("checkpoint", stored), ("restore", restored)):
                    began = time.perf_counter()
                    floors.run([*inside, "podman", "container", verb, name])
                    samples.append(time.perf_counter() - began)
    except AbsentError as error:
        report.absent("podman_checkpoint", str(error))
        return
    report.spread("podman_checkpoint", stored)
    report.spread("podman_restore", restored)


async def first_command(paddock: Installation, box: Box) -> None:
    said = await paddock.run(box, "cat /tmp/ready")
    assert said == "kept", said


async def main() -> None:
    report = Report("hibernate_fork", __doc__)
    rounds = 5 if report.is_quick else 30
    report.spread("copy_30mb", copy_floor(20))
    floors.measure(report, 20 if report.is_quick else 50)
    podman_checkpoint(report, 3 if report.is_quick else 10)
    async with Installation(pool_size=1, gateways=1, cold_creates_per_second=1000) as paddock:
        box = await paddock.create(timeout=3600)
        await paddock.run(box, HOLDER)
        for _ in range(200):
            if await paddock.run(box, "cat /tmp/ready 2>/dev/null || true") == "kept":
                break
            await asyncio.sleep(0.05)
        stored, restored, ids = [], [], []
        before = await writes(paddock)
        for _ in range(rounds):
            began = time.perf_counter()
            answer = await paddock.api("POST", f"/sandboxes/{box.id}/snapshots", {})
            stored.append(time.perf_counter() - began)
            ids.append(answer["snapshotID"])
            began = time.perf_counter()
            clone = await paddock.create(templateID=ids[-1], timeout=60)
            await first_command(paddock, clone)
            restored.append(time.perf_counter() - began)
            await paddock.api("DELETE", f"/sandboxes/{clone.id}")
            await paddock.api("DELETE", f"/templates/{ids[-1]}")
        report.writes("snapshot_clone_and_delete", await writes(paddock) - before, rounds)
        report.spread("snapshot", stored)
        report.spread("clone_to_first_command", restored)
        count = 10 if report.is_quick else 50
        before = await writes(paddock)
        began = time.perf_counter()
        made = await paddock.api(
            "POST", f"/sandboxes/{box.id}/fork", {"count": count, "timeout": 60}
        )
        wall = time.perf_counter() - began
        forks = [msgspec.convert(item["sandbox"], Box) for item in made if item.get("sandbox")]
        report.figure(f"fork_{count}_wall_ms", wall * 1e3)
        report.writes("fork", await writes(paddock) - before, count)
        report.figure("fork_success", len(forks) / count)
        if forks:
            report.figure("fork_each_ms", wall / len(forks) * 1e3)
        await asyncio.gather(*(first_command(paddock, fork) for fork in forks))
        for item in (*forks, box):
            await paddock.api("DELETE", f"/sandboxes/{item.id}")
    others = ("copy_30mb", *ALTERNATIVES, "podman_restore")
    report.against("clone_to_first_command", others, label="clone")
    report.against("snapshot", ("copy_30mb", "podman_checkpoint"))
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
