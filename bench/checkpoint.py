"""The time to hibernate, restore, store and fork a sandbox with 30 MB of process memory.

    sudo .venv/bin/python bench/checkpoint.py [--quick] [--rounds 10] [--forks 20]

A real node in its own state directory. The floor, measured in the same run: fork and exec of
`true`, and copying 30 MB of memory; `hibernate_fork.py` measures the same through the API, beside
other programs.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.port import Blueprint
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT)]

from tests.runtime.local.nodes import TestNode  # noqa: E402

MEGABYTES = 30
HOLDER = (
    f'python3 -c "import os, time; held = os.urandom({MEGABYTES} << 20); '
    "open('/tmp/ready', 'w').close(); time.sleep(10**6)\""
)


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def floor(report: Report) -> None:
    spawns, copies = [], []
    source = os.urandom(MEGABYTES << 20)
    for _ in range(20):
        began = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        spawns.append(time.perf_counter() - began)
        began = time.perf_counter()
        bytearray(source)
        copies.append(time.perf_counter() - began)
    report.spread("fork_exec", spawns)
    report.spread("copy_30mb", copies)


def blueprint(uid: str) -> Blueprint:
    return Blueprint(
        uid=uid, image="base", start_command=HOLDER, ready_command="test -e /tmp/ready"
    )


async def measure(report: Report, runtime: LocalRuntime, rounds: int, forks: int) -> None:
    await runtime.create(blueprint("bench"))
    await runtime.start("bench")
    hibernate, restore, store, fork = [], [], [], []
    failed: list[str] = []
    for _ in range(rounds):
        with report.trying("hibernating and restoring"):
            hibernate.append(await timed(lambda: runtime.hibernate("bench")))
            restore.append(await timed(lambda: runtime.restore("bench")))
    for number in range(rounds):
        name = f"cp-{number}"
        with report.trying("storing"):
            store.append(
                await timed(
                    lambda n=name: runtime.snapshot("bench", n, memory=True, keep_running=True)
                )
            )
            await runtime.delete_checkpoint(name)
    for number in range(3):
        children = tuple(blueprint(f"fork-{number}-{child}") for child in range(forks))
        made: list[Any] = []

        async def make(wanted: tuple[Blueprint, ...] = children, into: list[Any] = made) -> None:
            into.extend(await runtime.fork("bench", wanted))

        fork.append(await timed(make))
        failed += [one for one in made if isinstance(one, str)]
        await asyncio.gather(*(runtime.destroy(child.uid) for child in children))
    await runtime.destroy("bench")
    for name, samples in (("hibernate", hibernate), ("restore", restore), ("store", store)):
        report.spread(name, samples, failed=rounds - len(samples))
    report.spread(f"fork_{forks}", fork)
    report.figure("fork_success", 1 - len(failed) / (forks * len(fork)), f"of {forks * len(fork)}")
    for reason in failed[:1]:
        report.note(f"a fork failed: {reason}")
    report.figure(
        "fork_each_ms", sum(fork) / len(fork) / forks * 1e3, f"mean of {forks * len(fork)}"
    )
    for name in ("hibernate", "restore", "store"):
        report.against(name, ("fork_exec", "copy_30mb"))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--forks", type=int, default=20)


async def main() -> None:
    report = Report("checkpoint", __doc__, options)
    rounds = report.given.rounds or (5 if report.is_quick else 20)
    floor(report)
    node = TestNode()
    try:
        await node.start()
        await measure(report, node.runtime, rounds, report.given.forks)
    finally:
        await node.stop()
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
