"""Batches: deliver many sandboxes as one object, and run a task in each.

    python bench/batch.py [--quick] [--no-real] [--count 100] [--rounds 20]

With the simulated runtime on real time: 100 pooled sandboxes delivered as one batch (seconds, store
writes), 1,000 no-op tasks on 1,000 shards, and the cost per shard from 100 to 5,000. As root: 100
real sandboxes delivered as one batch through the API of a whole installation, from the request to
the event that reports all as ready, and a task in each; for comparison the cost of starting `true`
many times at once as bare processes, in bubblewrap, crun and podman, and of ten concurrent creates
by OpenSandbox's server.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import floors
import opensandbox
from counting import writes
from paddock.app.roles.control_plane import ControlPlane
from paddock.app.wiring import default_resources
from paddock.app.wiring.secrets import Secrets
from paddock.kit.clock import system
from paddock.kit.tasks import background
from paddock.resources.kinds.batch import (
    BatchPhase,
    BatchSandbox,
    BatchSandboxSpec,
    Process,
    TaskSpec,
    TaskTemplate,
)
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.simulated import Operation, SimulatedRuntime
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT)]

from tests.installation import Installation  # noqa: E402

SECRETS = Secrets(seed="seed", token="token", api_key="e2b_" + "a" * 40)


class CountingStore(MemoryStore):
    """Counts writes by kind, without Events."""

    def __init__(self) -> None:
        super().__init__(clock=system())
        self.writes: Counter[str] = Counter()

    async def create(self, obj, **options):
        self.writes[type(obj).__name__] += 1
        return await super().create(obj, **options)

    async def update(self, obj, **options):
        self.writes[type(obj).__name__] += 1
        return await super().update(obj, **options)

    async def update_status(self, obj, **options):
        self.writes[type(obj).__name__] += 1
        return await super().update_status(obj, **options)

    async def delete(self, kind, key, **options):
        self.writes[kind.__name__] += 1
        return await super().delete(kind, key, **options)

    @property
    def count(self) -> int:
        return sum(number for name, number in self.writes.items() if name != Event.__name__)


@contextlib.asynccontextmanager
async def world(store: MemoryStore):
    runtime = SimulatedRuntime(clock=system())
    for operation in Operation:
        runtime.set_latency(operation, 0.0)
    async with contextlib.AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="paddock-bench-"))
        settings = Settings(pool_size=0, state_dir=home)
        plane = ControlPlane(settings, SECRETS, store=store, runtime=runtime, clock=system())
        await stack.enter_async_context(plane.provider.run())
        await default_resources.ensure(plane.store, plane.keyring, plane.settings, SECRETS.api_key)
        for name, work in plane.work().items():
            await stack.enter_async_context(background(work, name=name))
        yield plane


def a_pool(count: int) -> SandboxPool:
    capacity = Capacity(buffer_min=0, buffer_max=count, pool_min=count, pool_max=count)
    return SandboxPool(
        metadata=ObjectMeta(name="p", namespace="default"),
        spec=SandboxPoolSpec(capacity=capacity, template=SandboxTemplateSpec()),
    )


def a_batch(name: str, count: int, *command: str) -> BatchSandbox:
    template = None
    if command:
        template = TaskTemplate(spec=TaskSpec(process=Process(command=command)))
    return BatchSandbox(
        metadata=ObjectMeta(name=name, namespace="default"),
        spec=BatchSandboxSpec(replicas=count, pool_ref="p", task_template=template),
    )


async def until(condition, seconds: float = 300) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def deliver(count: int, *command: str) -> tuple[float, int]:
    """Seconds from create to ready (or to the end of the last task), and store writes."""
    store = CountingStore()
    async with world(store) as plane:
        await plane.provider.write.create(a_pool(count))
        key = Key("default", "p")
        await until(lambda: len(plane.pool_members.members(key).available) == count)
        await asyncio.sleep(0.5)
        store.writes.clear()

        def phase():
            found = plane.provider.get(BatchSandbox, Key("default", "b"))
            return None if found is None else found.status.phase

        wanted = BatchPhase.COMPLETED if command else BatchPhase.RUNNING
        started = time.perf_counter()
        await plane.provider.write.create(a_batch("b", count, *command))
        await until(lambda: phase() is wanted)
        took = time.perf_counter() - started
        await asyncio.sleep(0.3)
        return took, store.count


def simulated(report: Report) -> None:
    def run(count: int, *command: str) -> tuple[float, int]:
        return asyncio.run(deliver(count, *command))

    rounds = 3 if report.is_quick else 10
    for name, size, command, times in (
        ("deliver_100", 100, (), rounds),
        ("tasks_1000", 1000, ("true",), 1 if report.is_quick else 10),
    ):
        done: list[tuple[float, int]] = []
        for _ in range(times):
            with report.trying(name):
                done.append(run(size, *command))
        report.spread(name, [seconds for seconds, _ in done], failed=times - len(done))
        # A batch is one object, with many tasks.
        operation, each = ("task_of_1000", 1000) if command else ("batch_of_100", 1)
        report.writes(operation, sum(count for _, count in done), each * len(done))
    sizes = (100, 1000) if report.is_quick else (100, 1000, 5000)
    for size in sizes:
        report.figure(f"ms_per_shard_{size}", run(size)[0] / size * 1000)
    report.ratio(
        f"shard_of_{sizes[-1]}_to_100", f"ms_per_shard_{sizes[-1]}", f"ms_per_shard_{sizes[0]}"
    )


# ---- real sandboxes --------------------------------------------------------------------------


DELIVERY_SECONDS = 300
GROUP = "/apis/paddock.dev/v1alpha1/namespaces/default"


class Api:
    """The declarative API of an installation, through its gateway as clients use it."""

    def __init__(self, paddock: Installation) -> None:
        self.paddock = paddock
        self._url = f"{paddock.url}{GROUP}"
        self._headers = {"Authorization": f"Bearer {paddock.secrets.token}"}

    async def call(self, method: str, path: str, body: object = None) -> dict:
        async with self.paddock.http.request(
            method, self._url + path, json=body, headers=self._headers
        ) as response:
            assert response.status < 400, await response.text()
            return await response.json()

    async def deliver(self, batch: dict, holds: Callable[[dict], bool]) -> tuple[float, dict]:
        """Seconds from the request to the first event that satisfies a condition, and the event."""
        version = (await self.call("GET", "/batchsandboxes"))["metadata"]["resourceVersion"]
        path = f"{self._url}/batchsandboxes?watch=true&resourceVersion={version}"
        async with (
            asyncio.timeout(DELIVERY_SECONDS),
            self.paddock.http.get(path, headers=self._headers) as events,
        ):
            started = time.perf_counter()
            await self.call("POST", "/batchsandboxes", batch)
            async for line in events.content:
                found = json.loads(line)["object"]
                if holds(found.get("status", {})):
                    return time.perf_counter() - started, found
        raise AssertionError("the watch ended before the batch was ready")

    async def gone(self, name: str) -> None:
        """Delete a batch, and wait until it is gone."""
        await self.call("DELETE", f"/batchsandboxes/{name}")
        async with asyncio.timeout(DELIVERY_SECONDS):
            while name in await self._names():
                await asyncio.sleep(0.1)

    async def _names(self) -> set[str]:
        items = (await self.call("GET", "/batchsandboxes"))["items"]
        return {item["metadata"]["name"] for item in items}

    async def stocked(self, count: int) -> None:
        """Wait until the pool is full and nothing is in flight."""
        async with asyncio.timeout(DELIVERY_SECONDS):
            while (await self._available()) < count:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1)

    async def _available(self) -> int:
        return (await self.call("GET", "/sandboxpools/p")).get("status", {}).get("available", 0)


def _object(kind: str, name: str, spec: dict) -> dict:
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


async def real(report: Report, count: int, rounds: int) -> None:
    """Deliver batches of real sandboxes, then batches with a command in each shard."""
    bounds = {"bufferMin": 0, "bufferMax": count, "poolMin": count, "poolMax": count}
    async with Installation(pool_size=0, gateways=os.cpu_count() or 1) as paddock:
        api = Api(paddock)
        spec = {"template": {"image": "base"}, "capacity": bounds}
        await api.call("POST", "/sandboxpools", _object("SandboxPool", "p", spec))
        plain = {"replicas": count, "poolRef": "p"}
        delivered, written, _ = await series(
            report, api, "b", plain, rounds,
            lambda status: status.get("ready", 0) == count and status.get("phase") == "Running",
        )  # fmt: skip
        task = {"spec": {"process": {"command": ["/bin/true"]}}}
        worked, task_writes, done = await series(
            report, api, "t", {**plain, "taskTemplate": task}, rounds,
            lambda status: status.get("phase") in ("Completed", "Failed"),
        )  # fmt: skip
    succeeded = sum(item["status"].get("taskSucceeded", 0) for item in done)
    for name, samples in ((f"real_deliver_{count}", delivered), (f"real_tasks_{count}", worked)):
        report.spread(name, samples, failed=rounds - len(samples))
    each = f"mean of {len(delivered) * count:,}"
    report.figure("real_deliver_each_ms", statistics.mean(delivered) / count * 1e3, each)
    report.writes(f"real_batch_of_{count}", written, len(delivered))
    tasks = len(worked) * count
    report.figure("real_task_each_ms", statistics.mean(worked) / count * 1e3, f"mean of {tasks:,}")
    report.figure("real_tasks_success", succeeded / rounds / count, f"of {rounds * count:,}")
    report.writes("real_task", task_writes, tasks)


async def series(
    report: Report, api: Api, name: str, spec: dict, rounds: int, holds: Callable[[dict], bool]
) -> tuple[list[float], int, list[dict]]:
    """Deliver batches one after the other; return times, writes, and results."""
    samples: list[float] = []
    written, ended = 0, []
    for number in range(rounds):
        with report.trying(f"batch {name}{number}"):
            await api.stocked(spec["replicas"])
            before = await writes(api.paddock)
            seconds, found = await api.deliver(
                _object("BatchSandbox", f"{name}{number}", spec), holds
            )
            samples.append(seconds)
            # Every store write increments the version.
            written += int(found["metadata"]["resourceVersion"]) - before
            ended.append(found)
            await api.gone(f"{name}{number}")
    return samples, written, ended


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--rounds", type=int, help="of real batches")


def main() -> None:
    report = Report("batch", __doc__, options)
    simulated(report)
    is_root = os.geteuid() == 0
    if report.given.real and not is_root:
        raise SystemExit("real sandboxes need root")
    if is_root and report.given.real is not False:
        count = report.given.count
        floors.together(report, count)
        opensandbox.together(report, max(4, count // 10))
        asyncio.run(real(report, count, report.given.rounds or (1 if report.is_quick else 20)))
        for name in (*floors.ALTERNATIVES, "opensandbox"):
            report.ratio(f"real_deliver_to_{name}", "real_deliver_each_ms", f"{name}_each_ms")
            report.ratio(f"real_task_to_{name}", "real_task_each_ms", f"{name}_each_ms")
    else:
        report.absent("real", "left out" if is_root else "real sandboxes need root")
    report.finish()


if __name__ == "__main__":
    main()
