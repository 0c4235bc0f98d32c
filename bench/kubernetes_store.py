"""The cost of the Kubernetes store, beside the API server's own ceiling in the same run.

    python -m bench.kubernetes_store [--quick] [--objects 10000] [--writes 2000]

Starts a control plane of its own (scripts/kube-build first). The ceiling is the same requests sent
as ready-made bytes whose answers nobody reads (`kubernetes_raw`), in turns with the store's.
"""

import argparse
import asyncio
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import uvloop
from bench.kubernetes_raw import RawWriters, Side
from bench.reporting import Report
from msgspec import structs
from tests.cluster.control_plane import KubeCluster

from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxAddress, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import ObjectMeta
from paddock.store.kubernetes import (
    ClientSettings,
    KubernetesStore,
    bodies,
    load_kubeconfig,
    paths,
)
from paddock.store.port import Change

WRITERS = 32
ROUNDS = 6
NS = "default"
PARAMS = {"fieldManager": "paddock", "fieldValidation": "Strict"}


def sandbox(name: str) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(namespace=NS, name=name, labels={"paddock.dev/pool": "bench"}),
        spec=SandboxSpec(template_ref=TemplateRef(name="base")),
    )


def running(obj: Sandbox, turn: int = 0) -> Sandbox:
    status = structs.replace(
        obj.status,
        phase=Phase.RUNNING,
        observed_generation=1,
        message=f"turn {turn}",
        node_name="node-1",
        address=SandboxAddress(ip="10.0.0.1", envd="10.0.0.1:49983", node="node-1"),
    )
    return structs.replace(obj, status=status)


async def written(
    objects: Iterable[Sandbox], write: Callable[[Sandbox], Awaitable[Sandbox]], side: Side
) -> list[Sandbox]:
    """Write each object with this many concurrent writers; return the results."""
    left, results = iter(objects), list[Sandbox]()

    async def writer() -> None:
        for obj in left:
            started = time.monotonic()
            results.append(await write(obj))
            side.took.append(time.monotonic() - started)

    with side.measured():
        await asyncio.gather(*(writer() for _ in range(WRITERS)))
    return results


async def writes(report: Report, store: KubernetesStore, count: int) -> None:
    """Create sandboxes and write their status, through the store and as raw bytes."""
    sides = {name: Side(name) for name in ("create", "bare_create", "status", "bare_status")}
    collection = paths.collection_path(Sandbox, NS)
    share = count // ROUNDS
    # The first writes of a kind wait for one-time work of the server.
    await written([sandbox(f"first-{number}") for number in range(64)], store.create, Side("first"))
    async with RawWriters.open(store.client.access, WRITERS) as raw:
        for turn in range(ROUNDS):
            wanted = [sandbox(f"made-{turn}-{number}") for number in range(share)]
            made = await written(wanted, store.create, sides["create"])
            wanted = [sandbox(f"raw-{turn}-{number}") for number in range(share)]
            requests = [
                raw.request("POST", collection, bodies.create_body(item), params=PARAMS)
                for item in wanted
            ]
            with sides["bare_create"].measured():
                sides["bare_create"].took += await raw.send(requests)
            named = [await store.get(Sandbox, item.key) for item in wanted]
            await written([running(item) for item in made], store.update_status, sides["status"])
            requests = [
                raw.request(
                    "PUT",
                    paths.object_path(Sandbox, item.key) + "/status",
                    bodies.status_body(running(item)),
                    params=PARAMS,
                )
                for item in named
            ]
            with sides["bare_status"].measured():
                sides["bare_status"].took += await raw.send(requests)
    for name, side in sides.items():
        side.tell(report, rate=f"{name}_per_s")
    for name in ("create", "status"):
        report.ratio(f"{name}_of_ceiling", f"{name}_per_s", f"bare_{name}_per_s")


async def reads(report: Report, store: KubernetesStore, objects: int) -> None:
    """List everything a few times, as a starting process does."""
    present = len((await store.list(Sandbox)).items)
    missing = [sandbox(f"fill-{number}") for number in range(max(0, objects - present))]
    await written(missing, store.create, Side("fill"))
    took, cpu = list[float](), 0.0
    for _ in range(3):
        before, started = _cpu_seconds(), time.monotonic()
        listed = len((await store.list(Sandbox)).items)
        took.append(time.monotonic() - started)
        cpu += _cpu_seconds() - before
    report.spread("list", took)
    report.figure("listed_objects", listed)
    report.figure("list_cpu_seconds", cpu / len(took), f"mean of {len(took)}")
    report.figure("max_rss_mb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def delivery(report: Report, store: KubernetesStore, count: int) -> None:
    """Measure the delay between a write's reply and its watch event."""
    obj = await store.create(sandbox("watched"))
    heard: dict[str, float] = {}
    lags: list[float] = []

    async def follow() -> None:
        since = obj.metadata.resource_version
        async with aclosing(store.watch(Sandbox, since=since, namespace=NS)) as events:
            async for event in events:
                if event.change is Change.MODIFIED:
                    heard[event.version] = time.monotonic()

    watching = asyncio.ensure_future(follow())
    for turn in range(count):
        obj = await store.update_status(running(obj, turn))
        told = time.monotonic()
        while obj.metadata.resource_version not in heard:
            await asyncio.sleep(0)
        lags.append(max(0.0, heard[obj.metadata.resource_version] - told))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    report.spread("watch_lag", lags)


@asynccontextmanager
async def opened(kubeconfig: str) -> AsyncIterator[KubernetesStore]:
    unlimited = ClientSettings(requests_per_second=1e6, burst=1_000_000, in_flight=WRITERS)
    store = KubernetesStore.open(load_kubeconfig([Path(kubeconfig)]), unlimited)
    try:
        yield store
    finally:
        await store.close()


async def measure(report: Report, kubeconfig: str) -> None:
    given = report.given
    count = given.writes or (600 if report.is_quick else 2000)
    objects = given.objects or (2000 if report.is_quick else 10_000)
    async with opened(kubeconfig) as store:
        await writes(report, store, count)
        await delivery(report, store, 100)
        await reads(report, store, objects)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--objects", type=int, help="sandboxes to list")
    parser.add_argument("--writes", type=int, help="of each kind, by each of the two")


def main() -> None:
    report = Report("kubernetes_store", __doc__, options)
    with KubeCluster(components=()) as cluster:
        uvloop.run(measure(report, cluster.info.kubeconfig))
    report.finish()


if __name__ == "__main__":
    main()
