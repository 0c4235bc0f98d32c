"""Snapshots and clones of live sandboxes through the API: snapshot, create, fork.

    python bench/hibernate_fork.py [--quick]

The sandbox holds 30 MB of memory that no page cache has, and a file that every clone must have.
The clone tier alone: neither warm nor cold starts are in these series. The floor is a copy of 30 MB
of memory; beside it are podman's checkpoints, where its CRIU runs, OpenSandbox's snapshots, which
store files and no memory, and what a start from nothing (no state at all) costs in fork and exec,
bubblewrap, crun and podman. A fork's time is until all of its sandboxes are there, for each of
them; `fork_to_first_command` is until each of them has answered. Needs root; starts an installation
of its own.
"""

import asyncio
import sys
import time

import floors
import opensandbox
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
    """Copying 30 MB of memory once: the least that a clone costs."""
    source = bytes(30 << 20)
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        bytearray(source)
        samples.append(time.perf_counter() - began)
    return samples


def podman_checkpoint(report: Report, rounds: int) -> None:
    """Checkpoint and restore by podman of a container that only sleeps.

    It runs in runc: the distribution's crun has no CRIU support.
    """
    stored, restored = [], []
    try:
        floors.program("runc")
        with floors.podman(runtime="runc") as command:
            # With --rm a checkpointed container is deleted.
            started = [word for word in command(floors.SLEEP, stays=True) if word != "--rm"]
            storing = [*started[: started.index("run")], "container"]
            name = floors.run(started).strip()
            verbs = (("checkpoint", stored), ("restore", restored))
            for verb, _ in verbs:  # The first attempt of each shows whether it is supported.
                floors.run([*storing, verb, name])
            for _ in range(rounds):
                for verb, samples in verbs:
                    with report.trying(f"podman {verb}"):
                        began = time.perf_counter()
                        floors.run([*storing, verb, name])
                        samples.append(time.perf_counter() - began)
    except AbsentError as error:
        report.absent("podman_checkpoint", str(error))
        return
    for verb, samples in verbs:
        failed = rounds - len(samples)
        report.spread(f"podman_{verb}", samples, failed=failed, is_ours=False)


async def first_command(paddock: Installation, box: Box) -> None:
    said = await paddock.run(box, "cat /tmp/ready")
    assert said == "kept", said


async def snapshots(paddock: Installation, report: Report, box: Box, rounds: int) -> None:
    """Snapshot a sandbox, and create another from the snapshot."""
    stored, created, answered = [], [], []
    before = await writes(paddock)
    for _ in range(rounds):
        with report.trying("a snapshot and its clone"):
            began = time.perf_counter()
            answer = await paddock.api("POST", f"/sandboxes/{box.id}/snapshots", {})
            stored.append(time.perf_counter() - began)
            began = time.perf_counter()
            clone = await paddock.create(templateID=answer["snapshotID"], timeout=60)
            made = time.perf_counter() - began
            await first_command(paddock, clone)
            answered.append(time.perf_counter() - began)
            created.append(made)
            await paddock.api("DELETE", f"/sandboxes/{clone.id}")
            await paddock.api("DELETE", f"/templates/{answer['snapshotID']}")
    report.writes("snapshot_clone_and_delete", await writes(paddock) - before, rounds)
    report.spread("snapshot", stored, failed=rounds - len(stored))
    report.spread("clone_create", created, failed=rounds - len(created))
    report.spread("clone_to_first_command", answered, failed=rounds - len(answered))


async def forks(
    paddock: Installation, report: Report, box: Box, *, rounds: int, count: int
) -> None:
    """Fork a sandbox into many repeatedly; every clone must have its content."""
    walls, answered = [], []
    written = made = 0
    for _ in range(rounds):
        with report.trying("a fork"):
            before = await writes(paddock)
            began = time.perf_counter()
            body = {"count": count, "timeout": 120}
            answer = await paddock.api("POST", f"/sandboxes/{box.id}/fork", body)
            wall = time.perf_counter() - began
            written += await writes(paddock) - before
            there = [
                msgspec.convert(item["sandbox"], Box) for item in answer if item.get("sandbox")
            ]
            made += len(there)
            if len(there) == count:
                walls.append(wall)
            answered += [took for took in await each_answers(paddock, report, there, began) if took]
            for item in there:
                await paddock.api("DELETE", f"/sandboxes/{item.id}")
    failed = rounds - len(walls)
    report.spread(f"fork_{count}", walls, failed=failed)
    report.spread("fork_each_ms", [wall / count for wall in walls], failed=failed)
    report.spread("fork_to_first_command", answered, failed=rounds * count - len(answered))
    report.figure("fork_success", made / rounds / count, f"of {rounds * count}")
    report.writes("fork", written, rounds * count)


async def each_answers(
    paddock: Installation, report: Report, boxes: list[Box], began: float
) -> list[float | None]:
    """Return the seconds until each has answered, `None` for one with wrong content."""

    async def one(box: Box) -> float | None:
        with report.trying("the first command of a fork"):
            await first_command(paddock, box)
            return time.perf_counter() - began
        return None

    return await asyncio.gather(*map(one, boxes))


async def main() -> None:
    report = Report("hibernate_fork", __doc__)
    rounds = 5 if report.is_quick else 100
    report.spread("copy_30mb", copy_floor(20))
    floors.measure(report, 20 if report.is_quick else 50)
    podman_checkpoint(report, 3 if report.is_quick else 10)
    opensandbox.snapshots(report, 10)
    async with Installation(pool_size=1, gateways=1, cold_creates_per_second=1000) as paddock:
        box = await paddock.create(timeout=3600)
        await paddock.run(box, HOLDER)
        for _ in range(200):
            if await paddock.run(box, "cat /tmp/ready 2>/dev/null || true") == "kept":
                break
            await asyncio.sleep(0.05)
        await snapshots(paddock, report, box, rounds)
        if report.is_quick:
            await forks(paddock, report, box, rounds=2, count=10)
        else:
            await forks(paddock, report, box, rounds=10, count=50)
        await paddock.api("DELETE", f"/sandboxes/{box.id}")
    others = ("copy_30mb", *ALTERNATIVES, "podman_restore")
    report.against("clone_to_first_command", others, label="clone")
    report.against("snapshot", ("copy_30mb", "podman_checkpoint", opensandbox.SNAPSHOT))
    report.against("clone_create", [opensandbox.CLONE])
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
