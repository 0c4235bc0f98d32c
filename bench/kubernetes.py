"""The load of sandboxes on a Kubernetes API server, beside the server's own ceiling.

    python -m bench.kubernetes [--quick] [--stock 2500] [--objects 10000]

Starts a control plane of its own (scripts/kube-build first). Claims are the manager's, with quota,
tokens and configuration, on a stock that is there. The ceiling is the very same write to the same
kind of object in the same stock, in turns with the claims, sent as ready-made bytes of whose
answers nothing is read (`kubernetes_raw`), by as many clients at once and with the same watch open.
Claimed sandboxes are simulated: this measures the control plane and the API server. Those that the
`controllers` process leads have their pods, which no kubelet runs. `kubernetes_pods.py` measures
real pods.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

import msgspec
import uvloop
from bench.kubernetes_raw import RawWriters, Side
from bench.reporting import Report
from msgspec import structs
from tests.cluster.control_plane import KubeCluster
from tests.cluster.info import ClusterInfo

from paddock.app.roles.control_plane import ControlPlane
from paddock.app.wiring import default_resources
from paddock.app.wiring.secrets import Secrets
from paddock.claims.caller import Caller, Role
from paddock.claims.requests import NewSandbox
from paddock.kit import ids
from paddock.kit.errors import PaddockError
from paddock.kit.tasks import background
from paddock.resources.kinds.builtin import Namespace
from paddock.resources.kinds.sandbox import (
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxAddress,
    SandboxSpec,
)
from paddock.resources.kinds.template import Resources, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.tokens import TokenSeed
from paddock.resources.transitions.claim import Terms, claimed
from paddock.runtime.blueprint import blueprint
from paddock.runtime.kubernetes.pods.render import PodSettings, render
from paddock.runtime.simulated import SimulatedRuntime
from paddock.settings import Settings
from paddock.store.kubernetes import (
    ClientSettings,
    KubernetesStore,
    bodies,
    load_kubeconfig,
    paths,
)
from paddock.store.kubernetes.client import REQUESTS

WRITERS = 32
LIVES = 20
ROUNDS = 8
POOL = Key("default", "base")
CALLER = Caller("default", "", Role.MEMBER)
SECRETS = Secrets(seed="seed", token="token", api_key="e2b_" + "a" * 40)
ROOT = Path(__file__).parents[1]


def open_store(info: ClusterInfo) -> KubernetesStore:
    access = load_kubeconfig([Path(info.kubeconfig)], context="admin")
    fast = ClientSettings(requests_per_second=100_000, burst=100_000, in_flight=WRITERS * 4)
    return KubernetesStore.open(access, fast)


def writes() -> int:
    """Return the writes of this process so far, without leases and events."""
    total = 0.0
    for metric in REQUESTS.collect():
        for sample in metric.samples:
            found = sample.labels
            if (
                sample.name.endswith("_total")
                and found["verb"] in ("POST", "PUT", "PATCH", "DELETE")
                and found["resource"] not in ("leases", "events")
            ):
                total += sample.value
    return int(total)


async def claims(report: Report, info: ClusterInfo, stock: int) -> None:
    """Fill a pool, measure whole lifecycles, then claim the stock at full speed."""
    store = open_store(info)
    plane = ControlPlane(
        Settings(pool_size=stock), SECRETS, store=store, runtime=SimulatedRuntime()
    )
    try:
        async with plane.provider.run():
            await default_resources.ensure(store, plane.keyring, plane.settings, SECRETS.api_key)
            async with contextlib.AsyncExitStack() as stack:
                for name, work in plane.work().items():
                    await stack.enter_async_context(background(work, name=name))
                await stocked(plane, stock)
                await lives(report, plane, stock)
            # The pool is not refilled from here on: only claims are measured.
            async with RawWriters.open(store.client.access, WRITERS) as raw:
                await race(report, plane, raw, stock)
    finally:
        await store.close()


async def stocked(plane: ControlPlane, count: int) -> None:
    async with asyncio.timeout(300):
        while len(plane.pool_members.members(POOL).available) < count:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1)


async def lives(report: Report, plane: ControlPlane, stock: int) -> None:
    """Claim and kill one by one, while the pool refills."""
    before, took = writes(), list[float]()
    for _ in range(LIVES):
        started = time.monotonic()
        box = await plane.manager.claims.create(CALLER, wanted())
        took.append(time.monotonic() - started)
        claim = box.spec.claim
        await plane.manager.lifecycle.kill(CALLER, claim.sandbox_id if claim else "")
    await stocked(plane, stock)
    report.spread("claim_alone", took)
    report.figure("writes_per_life", (writes() - before) / LIVES, f"mean of {LIVES}")


async def race(report: Report, plane: ControlPlane, raw: RawWriters, stock: int) -> None:
    """Alternate claims and raw writes on one stock, so that both meet the same load."""
    share = (stock - WRITERS) // (2 * ROUNDS)
    claiming, bare = Side("claim"), Side("bare_write")
    written = 0

    async def claim() -> None:
        nonlocal written
        left, before = iter(range(share)), writes()
        with claiming.measured():
            await asyncio.gather(*(take(plane, left, claiming) for _ in range(WRITERS)))
        written += writes() - before

    async def write() -> None:
        requests = [claim_request(plane, raw) for _ in range(share)]
        with bare.measured():
            bare.took += await raw.send(requests)

    for number in range(ROUNDS):
        for turn in (claim, write) if number % 2 else (write, claim):
            await turn()
            await asyncio.sleep(0.1)
    report.figure(
        "writes_per_claim", written / max(len(claiming.took), 1), f"mean of {len(claiming.took):,}"
    )
    claiming.tell(report, rate="claims_per_s")
    bare.tell(report, rate="ceiling_writes_per_s")
    report.ratio("claims_to_ceiling", "claims_per_s", "ceiling_writes_per_s")


async def take(plane: ControlPlane, left: Iterator[int], side: Side) -> None:
    for _ in left:
        started = time.monotonic()
        try:
            await plane.manager.claims.create(CALLER, wanted())
        except PaddockError:
            side.failed += 1
        else:
            side.took.append(time.monotonic() - started)


def claim_request(plane: ControlPlane, raw: RawWriters) -> bytes:
    """Reserve one and build the request that claims it, as the manager does."""
    sandbox = plane.pool_members.reserve(POOL)
    if sandbox is None:
        raise RuntimeError("stock is out: raise --stock")
    identity = ClaimIdentity(
        sandbox_id=ids.sandbox_id(),
        owner=CALLER.team,
        lock=ids.uid(),
        claim_time=plane.clock.now(),
        template_id="base",
        access_token_hash="a" * 64,
        timeout_seconds=300,
    )
    new = claimed(sandbox, Terms(identity=identity), now=plane.clock.now())
    return raw.request(
        "PUT",
        paths.object_path(Sandbox, sandbox.key),
        bodies.update_body(new),
        params={"fieldManager": "paddock", "fieldValidation": "Strict"},
    )


def wanted() -> NewSandbox:
    return NewSandbox(template="base", create_on_no_stock=False)


async def many(report: Report, info: ClusterInfo, objects: int) -> None:
    """Run a `controllers` process that leads this many running sandboxes with pods."""
    store = open_store(info)
    template = SandboxTemplate(
        metadata=ObjectMeta(namespace="default", name="many"),
        spec=SandboxTemplateSpec(
            image="debian:13", resources=Resources(cpu="2", memory="1Gi", disk="10Gi", pids=4096)
        ),
    )
    seed, settings = TokenSeed(b"seed"), PodSettings(agent_image="paddock")
    numbers = iter(range(objects))

    async def make() -> None:
        for number in numbers:
            made = await store.create(
                Sandbox(
                    metadata=ObjectMeta(namespace="default", name=f"many-{number}"),
                    spec=SandboxSpec(template=template.spec),
                )
            )
            plan = blueprint(made, template.spec, seed, checkpoint_id=None)
            pod = render(plan, settings, control_hash="0" * 64, incarnation=1)
            pod = structs.replace(pod, spec={**pod.spec, "nodeName": "node-1"})
            await store.create(pod)
            path = f"/api/v1/namespaces/default/pods/{pod.metadata.name}/status"
            await store.client.request(
                "PATCH", path, body=_RUNS, content_type="application/merge-patch+json"
            )
            status = structs.replace(
                made.status,
                phase=Phase.RUNNING,
                observed_generation=1,
                runtime="kubernetes",
                incarnation=1,
                node_name="node-1",
                image="debian:13",
                address=SandboxAddress(ip="127.0.0.1", envd="http://127.0.0.1:49983"),
            )
            await store.update_status(structs.replace(made, status=status))

    try:
        await store.create(Namespace(metadata=ObjectMeta(name="paddock-system")))
        # No controller creates it here, and pods are refused without it.
        account = {"metadata": {"name": "default"}}
        await asyncio.to_thread(
            info.request, "POST", "/api/v1/namespaces/default/serviceaccounts", account
        )
        await asyncio.gather(*(make() for _ in range(WRITERS)))
        for name, value in (await asyncio.to_thread(lead, info)).items():
            report.figure(name, value)
    finally:
        await store.close()


_RUNNING = {"running": {"startedAt": "2030-01-01T00:00:00Z"}}
_RUNS = msgspec.json.encode(
    {
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "hostIP": "127.0.0.1",
            "startTime": "2030-01-01T00:00:00Z",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "initContainerStatuses": [
                {"name": "envd", "image": "paddock", "imageID": "", "ready": True,
                 "restartCount": 0, "started": True, "state": _RUNNING}
            ],
            "containerStatuses": [
                {"name": "sandbox", "image": "debian:13", "imageID": "", "ready": True,
                 "restartCount": 0, "started": True, "state": _RUNNING}
            ],
        }
    }
)  # fmt: skip


def lead(info: ClusterInfo) -> dict[str, float]:
    """Start a `controllers` process: when it leads, it has listed everything; then measure."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "STORE": "kubernetes", "RUNTIME": "kubernetes", "KUBECONFIG": info.kubeconfig,
        "SEED": "seed", "TOKEN": "token", "AGENT_IMAGE": "paddock", "API_PORT": str(port),
        "LOG_JSON": "true",
    }  # fmt: skip
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as home:
        settings["STATE_DIR"] = home
        process = subprocess.Popen(
            [sys.executable, "-m", "paddock.app", "controllers"],
            cwd=ROOT,
            env={**os.environ, **{f"PADDOCK_{name}": text for name, text in settings.items()}},
            stdout=log,
            stderr=log,
        )
        try:
            began, leads = _moments(log, process)
            time.sleep(5)  # every sandbox is reconciled once
            return {
                "list_and_sync_s": (leads - began).total_seconds(),
                "controllers_rss_mb": _status(process.pid, "VmRSS:"),
                "controllers_peak_mb": _status(process.pid, "VmHWM:"),
            }
        finally:
            process.terminate()
            process.wait(timeout=30)


def _moments(log: IO[str], process: subprocess.Popen[bytes]) -> tuple[datetime, datetime]:
    """Return when a process began to list and when it led, from its log."""
    deadline = time.monotonic() + 180
    found: dict[str, datetime] = {}
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        for line in log:
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                found.setdefault(entry["message"], datetime.fromisoformat(entry["time"]))
        began = next((at for said, at in found.items() if said.startswith("Started server")), None)
        if began is not None and "leading" in found:
            return began, found["leading"]
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"it does not lead: {log.read()[-2000:]}")


def _status(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} of process {pid}")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stock", type=int, help="sandboxes to claim; half go to the ceiling")
    parser.add_argument("--objects", type=int, help="sandboxes that the controllers know")


def main() -> None:
    report = Report("kubernetes", __doc__, options)
    given = report.given
    stock = given.stock or (800 if report.is_quick else 2500)
    objects = (1000 if report.is_quick else 10_000) if given.objects is None else given.objects
    with KubeCluster(components=()) as cluster:
        uvloop.run(claims(report, cluster.info, stock))
    if objects:
        # On its own server: leftovers of the first part would count, too.
        with KubeCluster(components=()) as cluster:
            uvloop.run(many(report, cluster.info, objects))
    report.finish()


if __name__ == "__main__":
    main()
