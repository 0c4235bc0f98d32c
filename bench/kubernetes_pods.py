"""Sandboxes as real pods: create, first command, pause and resume, warm and cold.

    python -m bench.kubernetes_pods [--quick] [--rounds 30]

Everything is real: etcd, API server, scheduler, kubelet, containerd and runc on this machine,
Paddock installed by `paddock kube install` with one replica of each role, and E2B's SDK, which
reaches the Service of the gateways. Images are on the node. Warm sandboxes are taken from a pool
that is full again before each create; cold ones have no pool. Pauses freeze the pod through the
node's agent. Beside the cold ones: a pod with the same image, from its POST until its container
runs. Needs root, `scripts/test-kubernetes` once for the programs and images, and the SDK
(`scripts/install-clients`).
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from bench.reporting import ROOT, Report
from tests.cluster.control_plane import CONTROLLER_MANAGER, SCHEDULER, KubeCluster
from tests.cluster.node import images
from tests.cluster.node import machine as real
from tests.on_cluster.world.deployed import Deployed
from tests.on_cluster.world.installation import SDK

CLIENT = ROOT / "bench" / "clients" / "pods.py"
POOL = 3
WARM_UP = 2
"""Rounds that are not counted: caches of the node and of the client are filled."""
PODS = "/api/v1/namespaces/default/pods"
TEMPLATES = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates"
STEPS = ("create", "first_command", "pause", "resume", "resume_first_command")


class Client:
    """The SDK in one process, in the network namespace of the node."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def one(self, template: str) -> dict[str, Any]:
        """Run one sandbox; return the seconds of its steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{template}\n".encode())
        await self._process.stdin.drain()
        line = await asyncio.wait_for(self._process.stdout.readline(), 300)
        if not line:
            raise RuntimeError("the client has ended")
        return json.loads(line)


@contextlib.asynccontextmanager
async def client(deployed: Deployed) -> AsyncGenerator[Client]:
    url = f"http://{deployed.service('paddock')['spec']['clusterIP']}"
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--target={deployed.node.pid}", "--net", "--", str(SDK), str(CLIENT)),
        env={
            "PATH": "/usr/bin:/bin",
            "E2B_API_KEY": deployed.api_key,
            "E2B_API_URL": url,
            "E2B_SANDBOX_URL": url,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Client(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def rounds(
    report: Report, deployed: Deployed, sdk: Client, tier: str, template: str, count: int
) -> None:
    """Measure one tier."""
    found: list[dict[str, Any]] = []
    for number in range(WARM_UP + count):
        if tier == "warm":
            await deployed.until(lambda: deployed.is_stocked(POOL))
        # Pods of the round before, and of the pool, have ended and started.
        await deployed.until(lambda: settled(deployed))
        taken = await sdk.one(template)
        if "error" in taken:
            report.note(f"{tier}: {taken['error']}")
        if number >= WARM_UP:
            found.append(taken)
    for step in STEPS:
        samples = [item[step] for item in found if step in item]
        report.spread(f"{tier}_{step}", samples, failed=len(found) - len(samples))


def settled(deployed: Deployed) -> bool:
    """Whether no pod of a sandbox is starting or ending."""
    pods = deployed.items(PODS)
    return all(
        pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        for pod in pods
    )


async def bare(report: Report, deployed: Deployed, count: int) -> None:
    """Measure a pod without Paddock, from its POST until its container runs."""
    samples: list[float] = []
    for number in range(WARM_UP + count):
        await deployed.until(lambda: settled(deployed))
        name = f"bare-{number}"
        container = {"name": "main", "image": images.SANDBOX, "command": ["sleep", "600"]}
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
        body = {"metadata": {"name": name}, "spec": spec}
        with report.trying("a bare pod"):
            started = time.perf_counter()
            await asyncio.to_thread(deployed.info.request, "POST", PODS, body)
            while not await asyncio.to_thread(is_running, deployed, name):
                await asyncio.sleep(0.005)
            if number >= WARM_UP:
                samples.append(time.perf_counter() - started)
        await asyncio.to_thread(deployed.info.request, "DELETE", f"{PODS}/{name}")
    report.spread("bare_pod", samples, failed=count - len(samples), is_ours=False)


def is_running(deployed: Deployed, name: str) -> bool:
    pod = deployed.info.request("GET", f"{PODS}/{name}")
    return pod["status"].get("phase") == "Running"


def restarts(deployed: Deployed) -> int:
    """Return how often a role was restarted: a leader that loses its lease delays creates."""
    pods = deployed.items(f"/api/v1/namespaces/{deployed.namespace}/pods")
    return sum(
        container["restartCount"]
        for pod in pods
        for container in pod["status"].get("containerStatuses", ())
    )


async def measure(report: Report, cluster: KubeCluster, count: int) -> None:
    archive = await asyncio.to_thread(images.archive)
    async with real.RealNode(cluster, [archive], pause=images.PAUSE, has_services=True) as node:
        deployed = Deployed(cluster.info, node, "paddock-system")
        said = await deployed.paddock(
            *("install", "--image", images.PADDOCK, "--default-image", images.SANDBOX),
            *("--pool-size", str(POOL), "--replicas", "1", "--wait", "300"),
        )
        deployed.api_key = said["apiKey"]
        template = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxTemplate",
            "metadata": {"name": "cold"},
            "spec": {"image": images.SANDBOX, "resources": {"cpu": "1", "memory": "1Gi"}},
        }
        await asyncio.to_thread(deployed.info.request, "POST", TEMPLATES, template)
        await deployed.until(lambda: deployed.is_stocked(POOL))
        async with client(deployed) as sdk:
            await rounds(report, deployed, sdk, "warm", "base", count)
            await rounds(report, deployed, sdk, "cold", "cold", count)
        await bare(report, deployed, count)
        report.figure("role_restarts", restarts(deployed), "of all roles, in the whole run")
    report.ratio("cold_to_bare_pod", "cold_first_command", "bare_pod")
    report.ratio("warm_to_bare_pod", "warm_first_command", "bare_pod")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="sandboxes of each tier")


def main() -> None:
    report = Report("kubernetes_pods", __doc__, options)
    if not SDK.exists():
        sys.exit("the E2B client is not installed: run scripts/install-clients")
    count = report.given.rounds or (5 if report.is_quick else 30)
    real.check_programs()
    parts = (CONTROLLER_MANAGER, SCHEDULER)
    with KubeCluster(components=parts, our_kinds=False, has_kubelets=True) as cluster:
        asyncio.run(measure(report, cluster, count))
    report.finish()


if __name__ == "__main__":
    main()
