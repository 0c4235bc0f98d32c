"""Benchmark of the core: does cost stay flat as objects grow, and how fast is a durable write?

    python bench/core.py            everything, about two minutes
    python bench/core.py --quick    shorter rounds, for a look

- Flat cost: the same operations on a store (and an informer over it) of 1,000 and of 100,000
  Sandboxes of 1.5 KB, in short alternating rounds; the ratio of the best must be at most 1.5. Both
  are asked about 1,000 different objects, which lie scattered among the 100,000. Shown, but not
  judged: `get_scattered`, which asks about all 100,000 and so shows what the processor's caches
  contribute, and `list_by_namespace`, which searches the store's ordered keys. The spread is that
  of the rounds, each the mean of many operations: a clock per operation would cost more than some.
- Loading: 100,000 Sandboxes from SQLite in a process of its own: seconds and resident memory.
- Durable compare-and-swap updates with 64 writers, in rounds that alternate with raw SQLite, one
  fsync per write, and raw SQLite with 64 writes per fsync; the best round of each.

"""

import asyncio
import gc
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec import structs

from paddock.engine.informer import Informer
from paddock.kit import ids
from paddock.kit.errors import ConflictError
from paddock.kit.tasks import background
from paddock.resources import codec
from paddock.resources.kinds.sandbox import (
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxAddress,
    SandboxSpec,
    SandboxStatus,
    WakeOnTraffic,
)
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import (
    Condition,
    ConditionStatus,
    Key,
    ObjectMeta,
    OwnerReference,
)
from paddock.store.port import Store
from paddock.store.sqlite import SqliteStore
from paddock.store.sqlite.database import Database
from reporting import Report

FEW, MANY = 1_000, 20_000 if "--quick" in sys.argv else 100_000
PER_NAMESPACE = 20
WRITERS = 64
BODY_BYTES = 1_500
SHOWN_ONLY = ("get_scattered", "list_by_namespace")
MAX_RATIO, MAX_LOAD_SECONDS, MAX_RSS_MB, MIN_CAS_PER_SECOND = 1.5, 10, 600, 3_000


# ---- what is stored ----------------------------------------------------------------------


def sandbox(number: int, *, version: int) -> Sandbox:
    """Return a claimed, running sandbox of about the real size."""
    now = datetime(2030, 1, 1, tzinfo=UTC)
    pool = f"pool-{number % 50}"
    owner = OwnerReference(
        api_version="paddock.dev/v1alpha1", kind="Deployment", name=pool, uid=ids.uid()
    )
    draft = Sandbox(
        api_version=Sandbox.API_VERSION,
        kind=Sandbox.KIND,
        metadata=ObjectMeta(
            name=f"{pool}-{number:06}",
            namespace=f"team-{number // PER_NAMESPACE:05}",
            uid=ids.uid(),
            resource_version=str(version),
            generation=2,
            creation_timestamp=now,
            labels={
                "paddock.dev/pool": pool,
                "paddock.dev/template": "python-3-12",
                "paddock.dev/revision": "6f7d8c9b5d",
                "paddock.dev/claimed": "true",
            },
            finalizers=("paddock.dev/sandbox",),
            owner_references=(owner,),
        ),
        spec=SandboxSpec(
            template_ref=TemplateRef(name="python-3-12"),
            shutdown_time=now,
            wake_on_traffic=WakeOnTraffic(enabled=True),
            claim=ClaimIdentity(
                sandbox_id=ids.sandbox_id(),
                owner=f"team-{number % 500}",
                lock=ids.request_id(),
                claim_time=now,
                template_id="python-3-12",
                access_token_hash=ids.token(),
                metadata={"user": f"user-{number}", "purpose": "data analysis"},
            ),
        ),
        status=SandboxStatus(
            observed_generation=2,
            phase=Phase.RUNNING,
            conditions=(
                Condition(
                    type="Ready",
                    status=ConditionStatus.TRUE,
                    reason="EnvdHealthy",
                    message="envd answers on every port it should",
                    last_transition_time=now,
                ),
            ),
            runtime="local",
            node_name="node-1",
            address=SandboxAddress(ip=f"10.1.{number // 250 % 250}.{number % 250}", node="node-1"),
            started_at=now,
            image="registry.example/team/python:3.12-slim",
        ),
    )
    missing = BODY_BYTES - len(codec.encode(draft))
    meta = structs.replace(draft.metadata, annotations={"note": f"{number}".rjust(missing - 27)})
    return structs.replace(draft, metadata=meta)


def fill(path: Path, count: int) -> None:
    """Write a store file with that many sandboxes."""
    path.parent.mkdir(parents=True)
    database = Database(path, history=100)
    for start in range(0, count, 5_000):
        rows: list[Any] = []
        for number in range(start, min(start + 5_000, count)):
            obj = sandbox(number, version=number + 2)
            rows.append(("Sandbox", *obj.key, number + 2, codec.encode(obj)))
        database.write(rows)
    database.close()


def key_of(number: int) -> Key:
    return Key(f"team-{number // PER_NAMESPACE:05}", f"pool-{number % 50}-{number:06}")


def touched(obj: Sandbox, number: int) -> Sandbox:
    """Change what a pause changes: a flag and a deadline in the spec."""
    deadline = datetime.fromtimestamp(1_900_000_000 + number, UTC)
    spec = structs.replace(obj.spec, paused=not obj.spec.paused, shutdown_time=deadline)
    return structs.replace(obj, spec=spec)


# ---- flat cost ---------------------------------------------------------------------------


class World:
    """One store of a size, and an informer on it."""

    def __init__(self, size: int, store: Store) -> None:
        self.size = size
        self.store = store
        self.informer = Informer(
            store,
            Sandbox,
            indexes={
                "sandboxID": lambda obj: (obj.spec.claim.sandbox_id,) if obj.spec.claim else (),
                "namespace": lambda obj: (obj.metadata.namespace,),
            },
        )
        self.heard = asyncio.Event()
        self.position = 0
        self.ids: list[str] = []
        self.asked = [
            key_of(first + offset)
            for first in range(0, size, size // FEW * PER_NAMESPACE)
            for offset in range(PER_NAMESPACE)
        ]
        assert len(self.asked) == FEW

    def next_key(self) -> Key:
        """Return the next object to read, in large strides."""
        self.position += 1
        return self.asked[self.position * 619 % FEW]

    def learn_ids(self) -> None:
        """Prepare the ids to read, as from requests: equal, not identical."""
        found = (self.informer.get(key) for key in self.asked)
        self.ids = [str(obj.spec.claim.sandbox_id.encode(), "ascii") for obj in found]  # pyright: ignore[reportOptionalMemberAccess]

    async def get_scattered(self) -> None:
        self.position += 1
        await self.store.get(Sandbox, key_of(self.position * 7_919 % self.size))

    async def get_by_key(self) -> None:
        await self.store.get(Sandbox, self.next_key())

    async def get_by_index(self) -> None:
        self.position += 1
        sandbox_id = self.ids[self.position * 619 % FEW]
        assert len(self.informer.by_index("sandboxID", sandbox_id)) == 1

    async def list_by_index(self) -> None:
        found = self.informer.by_index("namespace", self.next_key().namespace)
        assert len(found) == PER_NAMESPACE

    async def list_by_namespace(self) -> None:
        page = await self.store.list(Sandbox, namespace=self.next_key().namespace)
        assert len(page.items) == PER_NAMESPACE

    async def update(self) -> None:
        key = self.next_key()
        while True:
            try:
                await self.store.update(touched(await self.store.get(Sandbox, key), self.position))
            except ConflictError:
                continue  # another of the 64 writers won
            return

    async def update_and_hear(self) -> None:
        """Write, and wait until the informer's handler is called."""
        self.heard.clear()
        await self.update()
        await self.heard.wait()


async def spread(world: World, operation: Callable[[World], Awaitable[None]], count: int) -> float:
    """Return seconds per operation with 64 concurrent callers."""

    async def caller() -> None:
        for _ in range(count // WRITERS):
            await operation(world)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(WRITERS):
            tasks.create_task(caller())
    return (time.perf_counter() - started) / count


async def single(world: World, operation: Callable[[World], Awaitable[None]], count: int) -> float:
    """Return seconds per operation, sequentially."""
    started = time.perf_counter()
    for _ in range(count):
        await operation(world)
    return (time.perf_counter() - started) / count


async def flat(report: Report, directory: Path, rounds: int) -> None:
    measures = {
        "get_by_key": (World.get_by_key, single, 1_000),
        "get_by_index": (World.get_by_index, single, 1_000),
        "get_scattered": (World.get_scattered, single, 1_000),
        "list_by_index": (World.list_by_index, single, 1_000),
        "list_by_namespace": (World.list_by_namespace, single, 200),
        "cas_update": (World.update, spread, 640),
        "watch_delivery": (World.update_and_hear, single, 40),
    }
    taken: dict[tuple[str, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        worlds: list[World] = []
        for size in (FEW, MANY):
            store = await stack.enter_async_context(
                await SqliteStore.open(directory / str(size) / "store.db")
            )
            world = World(size, store)
            await stack.enter_async_context(background(world.informer.run(), name="informer"))
            await world.informer.wait_synced()
            world.learn_ids()
            world.informer.subscribe(lambda _old, _new, world=world: world.heard.set())
            worlds.append(world)
        gc.collect()
        for number in range(rounds):
            for name, (operation, measure, count) in measures.items():
                for world in worlds if number % 2 else reversed(worlds):
                    seconds = await measure(world, operation, count)
                    taken.setdefault((name, world.size), []).append(seconds)
    for (name, size), values in taken.items():
        report.spread(f"{name}_{size}", values)
        # The best round: other load of the machine does not count.
        report.figure(f"{name}_us_{size}", min(values) * 1e6, f"best of {len(values):,}")
    for name in measures:
        report.ratio(f"{name}_{MANY}_to_{FEW}", f"{name}_us_{MANY}", f"{name}_us_{FEW}")


# ---- durable writes ----------------------------------------------------------------------


def raw_database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE objects (id INTEGER PRIMARY KEY, version INTEGER, body BLOB)")
    body = os.urandom(BODY_BYTES)
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO objects VALUES (?, 1, ?)", ((number, body) for number in range(FEW))
    )
    connection.execute("COMMIT")
    return connection


def raw_updates(connection: sqlite3.Connection, *, per_fsync: int, seconds: float) -> float:
    """Return updates per second of plain SQLite with this many per transaction."""
    statement = "UPDATE objects SET version = version + 1, body = ? WHERE id = ?"
    body = os.urandom(BODY_BYTES)
    done = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        connection.execute("BEGIN IMMEDIATE")
        for number in range(per_fsync):
            connection.execute(statement, (body, (done + number) * 7 % FEW))
        connection.execute("COMMIT")
        done += per_fsync
    return done / (time.perf_counter() - started)


async def store_updates(store: Store, seconds: float) -> tuple[float, list[float]]:
    """Return updates per second with 64 writers, and each latency."""
    latencies: list[float] = []
    started = time.perf_counter()

    async def writer(number: int) -> None:
        obj = await store.get(Sandbox, key_of(number))
        while time.perf_counter() - started < seconds:
            begun = time.perf_counter()
            obj = await store.update(touched(obj, number))
            latencies.append(time.perf_counter() - begun)

    async with asyncio.TaskGroup() as tasks:
        for number in range(WRITERS):
            tasks.create_task(writer(number))
    return len(latencies) / (time.perf_counter() - started), latencies


async def durable(report: Report, directory: Path, rounds: int, seconds: float) -> None:
    single_raw = raw_database(directory / "single.db")
    group_raw = raw_database(directory / "group.db")
    ours: list[float] = []
    one_each: list[float] = []
    grouped: list[float] = []
    latencies: list[float] = []
    async with await SqliteStore.open(directory / "cas" / "store.db") as store:
        before = int((await store.list(Sandbox, limit=1)).version)
        for _ in range(rounds):
            one_each.append(raw_updates(single_raw, per_fsync=1, seconds=seconds))
            rate, some = await store_updates(store, seconds)
            ours.append(rate)
            latencies += some
            grouped.append(raw_updates(group_raw, per_fsync=WRITERS, seconds=seconds))
        written = int((await store.list(Sandbox, limit=1)).version) - before
    single_raw.close()
    group_raw.close()
    report.spread("durable_cas", latencies)
    report.writes("durable_cas", written, len(latencies))
    report.figure("durable_cas_per_second", max(ours), f"best of {len(ours)}")
    report.figure(
        "raw_sqlite_one_fsync_per_write_per_second", max(one_each), f"best of {len(one_each)}"
    )
    report.figure("raw_sqlite_64_per_fsync_per_second", max(grouped), f"best of {len(grouped)}")
    report.ratio(
        "durable_cas_to_one_fsync_per_write",
        "durable_cas_per_second",
        "raw_sqlite_one_fsync_per_write_per_second",
    )
    report.ratio(
        "durable_cas_to_raw_group_commit",
        "durable_cas_per_second",
        "raw_sqlite_64_per_fsync_per_second",
    )


# ---- loading -----------------------------------------------------------------------------


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def load_once(path: Path) -> None:
    """Open a store and report time and memory: run in a separate process."""
    before = resident_mb()
    started = time.perf_counter()
    async with await SqliteStore.open(path) as store:
        seconds = time.perf_counter() - started
        found = len((await store.list(Sandbox)).items)
        figures = {"seconds": seconds, "rss_mb": resident_mb(), "own_mb": before, "found": found}
        print(msgspec.json.encode(figures).decode())


def load(report: Report, path: Path, rounds: int) -> None:
    runs: list[dict[str, float]] = []
    for _ in range(rounds):
        command = [sys.executable, __file__, "--load", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(msgspec.json.decode(done.stdout))
    assert all(run["found"] == MANY for run in runs)
    report.spread("load", [run["seconds"] for run in runs])
    report.figure("load_seconds", min(run["seconds"] for run in runs), f"best of {len(runs)}")
    report.figure("load_rss_mb", max(run["rss_mb"] for run in runs), f"worst of {len(runs)}")
    report.figure("empty_process_mb", runs[0]["own_mb"])


# ---- all of it ---------------------------------------------------------------------------


def misses(figures: dict[str, Any], ratios: dict[str, float]) -> list[str]:
    """Return the requirements that do not hold."""
    found = [
        f"{name} is {value:.2f}, more than {MAX_RATIO}"
        for name, value in ratios.items()
        if name.endswith(f"_to_{FEW}") and not name.startswith(SHOWN_ONLY) and value > MAX_RATIO
    ]
    if figures["load_seconds"] > MAX_LOAD_SECONDS:
        found.append(f"loading took more than {MAX_LOAD_SECONDS} s")
    if figures["load_rss_mb"] > MAX_RSS_MB:
        found.append(f"{MANY} objects took more than {MAX_RSS_MB} MB")
    if figures["durable_cas_per_second"] < MIN_CAS_PER_SECOND:
        found.append(f"fewer than {MIN_CAS_PER_SECOND} durable updates a second")
    return found


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--load":
        uvloop.run(load_once(Path(sys.argv[2])))
        return 0
    report = Report("core", __doc__)
    rounds = 3 if report.is_quick else 7
    seconds = 0.7 if report.is_quick else 1.5
    directory = Path(tempfile.mkdtemp(prefix="paddock-bench-"))
    try:
        for size in (FEW, MANY):
            fill(directory / str(size) / "store.db", size)
        fill(directory / "cas" / "store.db", FEW)
        report.figure("object_bytes", len(codec.encode(sandbox(1, version=3))))
        load(report, directory / str(MANY) / "store.db", 1 if report.is_quick else 3)
        uvloop.run(durable(report, directory, rounds, seconds))
        uvloop.run(flat(report, directory, rounds * 6))
    finally:
        shutil.rmtree(directory)
    missed = misses(report.figures, report.ratios)
    report.finish(holds=not missed)
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
