"""The store: durable compare-and-swap, by one writer and by many, beside plain SQLite and fsync.

    python bench/store.py [--quick]

A writer's time is from asking to the acknowledged, fsynced write. The floor is an fsync of one
page; beside it is one SQLite transaction per write on the same disk in the same run. Nothing else
that other suites compare with keeps objects. `core.py` has the cost of reads and watches at
different sizes.
"""

import asyncio
import os
import sqlite3
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs

from paddock.kit.encryption import DataCipher, create_key
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import ObjectMeta
from paddock.store.sqlite import SqliteStore
from reporting import Report

WRITERS = 64
SPEC = SandboxSpec(template_ref=TemplateRef(name="base"))


def fsyncs(path: Path, count: int) -> list[float]:
    samples = []
    handle = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        for number in range(count):
            began = time.perf_counter()
            os.pwrite(handle, bytes(4096), number * 4096)
            os.fdatasync(handle)
            samples.append(time.perf_counter() - began)
    finally:
        os.close(handle)
    return samples


def transactions(path: Path, count: int) -> list[float]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE objects (id INTEGER PRIMARY KEY, body BLOB)")
    body = os.urandom(1500)
    samples = []
    for number in range(count):
        began = time.perf_counter()
        connection.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (number % 100, body))
        samples.append(time.perf_counter() - began)
    connection.close()
    return samples


async def writes(
    report: Report, store: SqliteStore, writers: int, seconds: float
) -> tuple[list[float], int, float]:
    """Write with this many writers for a while; return times, failures, and the rate."""
    samples: list[float] = []
    tried = 0
    began = time.perf_counter()

    async def write(number: int) -> None:
        nonlocal tried
        name = f"w{writers}-{number}"
        obj = await store.create(
            Sandbox(metadata=ObjectMeta(name=name, namespace="default"), spec=SPEC)
        )
        turn = 0
        while time.perf_counter() - began < seconds:
            turn += 1
            tried += 1
            end = datetime.fromtimestamp(1_900_000_000 + turn, UTC)
            changed = structs.replace(obj, spec=structs.replace(obj.spec, shutdown_time=end))
            with report.trying("a write"):
                asked = time.perf_counter()
                obj = await store.update(changed)
                samples.append(time.perf_counter() - asked)

    await asyncio.gather(*(write(number) for number in range(writers)))
    return samples, tried - len(samples), len(samples) / (time.perf_counter() - began)


async def version(store: SqliteStore) -> int:
    """Return the number of the last write."""
    return int((await store.list(Sandbox, limit=1)).version)


async def main() -> None:
    report = Report("store", __doc__)
    count, seconds = (300, 3.0) if report.is_quick else (2000, 20.0)
    how = f"one run of {seconds:g} s"
    with tempfile.TemporaryDirectory(prefix="paddock-bench-") as directory:
        home = Path(directory)
        report.spread("fdatasync", fsyncs(home / "page", count))
        plain = transactions(home / "plain.db", count)
        report.spread("sqlite_transaction", plain)
        report.figure("sqlite_per_second", len(plain) / sum(plain), f"one run of {count:,}")
        cipher = DataCipher([create_key()])  # as in an installation
        async with await SqliteStore.open(home / "store.db", cipher=cipher) as store:
            before = await version(store)
            alone, failed, rate = await writes(report, store, 1, seconds)
            # Each writer creates its object before it updates it.
            report.writes("update_alone", await version(store) - before - 1, len(alone))
            report.spread("cas_alone", alone, failed=failed)
            report.figure("cas_alone_per_second", rate, how)
            before = await version(store)
            many, failed, rate = await writes(report, store, WRITERS, seconds)
            written = await version(store) - before - WRITERS
            report.writes(f"update_of_{WRITERS}_writers", written, len(many))
            report.spread(f"cas_{WRITERS}_writers", many, failed=failed)
            report.figure(f"cas_{WRITERS}_writers_per_second", rate, how)
        began = time.perf_counter()
        async with await SqliteStore.open(home / "store.db", cipher=cipher):
            report.figure("open_again_ms", (time.perf_counter() - began) * 1e3)
    for ours in ("cas_alone", f"cas_{WRITERS}_writers"):
        report.against(ours, ("fdatasync", "sqlite_transaction"))
    report.ratio(
        f"cas_{WRITERS}_writers_per_second_to_sqlite",
        f"cas_{WRITERS}_writers_per_second",
        "sqlite_per_second",
    )
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
