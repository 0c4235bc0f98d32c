"""Batches: delivering many sandboxes as one object, and running a task in each.

    python bench/batch.py [--quick] [--no-real] [--count 100] [--rounds 10]

With the simulated runtime on real time: 100 pooled sandboxes delivered as one batch (seconds,
store writes), 1,000 no-op tasks on 1,000 shards, and the cost per shard from 100 to 5,000. Where
this is run by root: 100 sandboxes of this machine delivered as one batch through the API of a
whole installation, from the request to the event that says that all are ready, and a task in
each; beside it what starting `true` costs each of many at once, as bare processes, in bubblewrap,
crun and podman.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import floors
from claim import Installation
from paddock.app import defaults
from paddock.app.control import ControlPlane
from paddock.app.secrets import Secrets
from paddock.kit.clock import system
from paddock.kit.settings import Settings
from paddock.kit.tasks import background
from paddock.resources.batch import (
    BatchPhase,
    BatchSandbox,
    BatchSandboxSpec,
    Process,
    TaskSpec,
    TaskTemplate,
)
from paddock.resources.builtin import Event
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.template import SandboxTemplateSpec
from paddock.runtime.simulated import Operation, SimulatedRuntime
from paddock.store.memory import MemoryStore
from reporting import Report

SECRETS = Secrets(seed="seed", token="token", api_key="e2b_" + "a" * 40)


class CountingStore(MemoryStore):
    """Counts writes by kind; Events, which say what happened and change nothing, apart."""

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
        await defaults.ensure(plane.store, plane.keyring, plane.settings, SECRETS.api_key)
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
    """Seconds from create to ready (or to the last task's end), and store writes meanwhile."""
    store = CountingStore()
    async with world(store) as plane:
        await plane.provider.write.create(a_pool(count))
        key = Key("default", "p")
        await until(lambda: len(plane.census.members(key).available) == count)
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
    delivered = [run(100) for _ in range(rounds)]
    report.spread("deliver_100", [seconds for seconds, _ in delivered])
    report.writes("batch_of_100", sum(writes for _, writes in delivered), rounds)
    worked = [run(1000, "true") for _ in range(1 if report.is_quick else 3)]
    report.spread("tasks_1000", [seconds for seconds, _ in worked])
    report.writes("task_of_1000", sum(writes for _, writes in worked), 1000 * len(worked))
    sizes = (100, 1000) if report.is_quick else (100, 1000, 5000)
    for size in sizes:
        report.figure(f"ms_per_shard_{size}", run(size)[0] / size * 1000)
    report.ratio(
        f"shard_of_{sizes[-1]}_to_100", f"ms_per_shard_{sizes[-1]}", f"ms_per_shard_{sizes[0]}"
    )


# ---- real sandboxes --------------------------------------------------------------------------


GROUP = "/apis/paddock.dev/v1alpha1/namespaces/default"


class Api:
    """The declarative API of an installation."""

    def __init__(self, place: Installation) -> None:
        secrets = json.loads((place.home / "state" / "secrets.json").read_bytes())
        self._headers = {"Authorization": f"Bearer {secrets['token']}"}
        self._netloc = place.url.removeprefix("http://")

    def call(self, method: str, path: str, body: object = None) -> dict:
        with contextlib.closing(self._connect()) as connection:
            data = json.dumps(body) if body is not None else None
            headers = {**self._headers, "Content-Type": "application/json"}
            connection.request(method, GROUP + path, data, headers)
            answer = json.loads(connection.getresponse().read())
        if answer.get("kind") == "Status" and answer.get("status") == "Failure":
            raise SystemExit(answer["message"])
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._netloc, timeout=300)

    def deliver(self, batch: dict, holds: Callable[[dict], bool]) -> tuple[float, dict]:
        """Seconds from the request to the first event of which something holds, and that."""
        version = self.call("GET", "/batchsandboxes")["metadata"]["resourceVersion"]
        with contextlib.closing(self._connect()) as watching:
            path = f"{GROUP}/batchsandboxes?watch=true&resourceVersion={version}"
            watching.request("GET", path, headers=self._headers)
            events = watching.getresponse()
            started = time.perf_counter()
            self.call("POST", "/batchsandboxes", batch)
            for line in events:
                found = json.loads(line)["object"]
                if holds(found.get("status", {})):
                    return time.perf_counter() - started, found
        raise SystemExit("the watch ended before the batch was ready")

    def gone(self, name: str) -> None:
        """Delete a batch, and wait until its pool is full again."""
        self.call("DELETE", f"/batchsandboxes/{name}")
        while any(
            item["metadata"]["name"] == name
            for item in self.call("GET", "/batchsandboxes")["items"]
        ):
            time.sleep(0.2)

    def stocked(self, count: int) -> None:
        deadline = time.monotonic() + 300
        while self.call("GET", "/sandboxpools/p").get("status", {}).get("available", 0) < count:
            if time.monotonic() > deadline:
                raise SystemExit("the pool did not fill up in time")
            time.sleep(0.2)
        time.sleep(1)


def _object(kind: str, name: str, spec: dict) -> dict:
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


def real(report: Report, count: int, rounds: int) -> None:
    """Deliver batches of real sandboxes, then some whose shards each run a command."""
    bounds = {"bufferMin": 0, "bufferMax": count, "poolMin": count, "poolMax": count}
    delivered, worked = [], []
    written = task_writes = succeeded = 0
    with Installation(pool_size=0) as place:
        api = Api(place)
        spec = {"template": {"image": "base"}, "capacity": bounds}
        api.call("POST", "/sandboxpools", _object("SandboxPool", "p", spec))
        for number in range(rounds):
            api.stocked(count)
            before = place.written()
            seconds, ready = api.deliver(
                _object("BatchSandbox", f"b{number}", {"replicas": count, "poolRef": "p"}),
                lambda status: status.get("ready", 0) == count and status.get("phase") == "Running",
            )
            delivered.append(seconds)
            # Every write of the store gives the next version, whatever it writes.
            written += int(ready["metadata"]["resourceVersion"]) - before
            api.gone(f"b{number}")
        task = {"spec": {"process": {"command": ["/bin/true"]}}}
        spec = {"replicas": count, "poolRef": "p", "taskTemplate": task}
        for number in range(max(1, rounds // 3)):
            api.stocked(count)
            before = place.written()
            took, done = api.deliver(
                _object("BatchSandbox", f"t{number}", spec),
                lambda status: status.get("phase") in ("Completed", "Failed"),
            )
            worked.append(took)
            task_writes += int(done["metadata"]["resourceVersion"]) - before
            succeeded += done["status"].get("taskSucceeded", 0)
            api.gone(f"t{number}")
    report.spread(f"real_deliver_{count}", delivered)
    report.figure("real_deliver_each_ms", sum(delivered) / rounds / count * 1e3)
    report.writes(f"real_batch_of_{count}", written, rounds)
    report.spread(f"real_tasks_{count}", worked)
    report.figure("real_task_each_ms", sum(worked) / len(worked) / count * 1e3)
    report.figure("real_tasks_success", succeeded / count / len(worked))
    report.writes("real_task", task_writes, count * len(worked))


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
        real(report, count, report.given.rounds or (1 if report.is_quick else 6))
        for name in floors.ALTERNATIVES:
            report.ratio(f"real_deliver_to_{name}", "real_deliver_each_ms", f"{name}_each_ms")
            report.ratio(f"real_task_to_{name}", "real_task_each_ms", f"{name}_each_ms")
        reason = "it makes one at a time; cold and claim compare with it"
        report.absent("opensandbox_each_ms", reason)
    else:
        report.absent("real", "left out" if is_root else "real sandboxes need root")
    report.finish()


if __name__ == "__main__":
    main()
