"""Three control planes in separate processes; one is stopped meanwhile, then continues."""

import asyncio
import contextlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from paddock.kit.tasks import background
from paddock.manager.federation.service import FRESH_SECONDS
from tests.ports import free_port

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

ENVS = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxenvs"


class Process:
    """One control plane."""

    def __init__(self, name: str, ports: dict[str, int], place: Path) -> None:
        self.name, self.place = name, place
        peers = (
            f"{other}=http://127.0.0.1:{port}" for other, port in ports.items() if other != name
        )
        self.url = f"http://127.0.0.1:{ports[name]}"
        self.environment = {
            **os.environ,
            "PADDOCK_STATE_DIR": str(place),
            "PADDOCK_RUN_DIR": str(place / "run"),
            "PADDOCK_API_PORT": str(ports[name]),
            "PADDOCK_PORT": str(free_port()),
            "PADDOCK_KUBE_PORT": "0",
            "PADDOCK_STORE": "memory",
            "PADDOCK_RUNTIME": "simulated",
            "PADDOCK_SEED": "s" * 32,
            "PADDOCK_TOKEN": "token",
            "PADDOCK_CLUSTER_ID": name,
            "PADDOCK_POOL_SIZE": "0",
            "PADDOCK_FEDERATION_PEERS": ",".join(peers),
            "PADDOCK_LOG_LEVEL": "warning",
        }

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        self.place.mkdir()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "paddock.app", "control", env=self.environment
        )
        self.pid = process.pid
        headers = {"Authorization": "Bearer token"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=40) as client:
            self.kube = client
            try:
                yield
            finally:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                await process.wait()

    async def ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await self.kube.get("/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.1)

    async def give(self, size: int) -> None:
        spec = {
            "templateRef": {"name": "base"},
            "clusters": {self.name: {"members": {"m": {"replicas": size}}}},
        }
        body = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxEnv",
            "metadata": {"name": "agents"},
            "spec": spec,
        }
        answer = await self.kube.post(ENVS, json=body)
        assert answer.status_code == 201, answer.text

    async def create(self) -> tuple[int, str]:
        """Claim through this one; return the status and the sandbox."""
        secrets = (self.place / "secrets.json").read_text()
        key = secrets.partition('"api_key":')[2].partition('"')[2].partition('"')[0]
        answer = await self.kube.post(
            "/sandboxes", json={"templateID": "agents"}, headers={"X-API-Key": key}
        )
        return answer.status_code, answer.json().get("sandboxID", "")

    async def sent_to(self, other: str) -> int:
        """Return how many claims it has forwarded to another, successful or not."""
        told = (await self.kube.get("/metrics")).text
        counted = rf'^paddock_federation_claims_total{{cluster="{other}",.*}} (\d+)'
        return sum(map(int, re.findall(counted, told, re.MULTILINE)))

    async def holds(self, sandbox_id: str) -> bool:
        path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes"
        return sandbox_id in (await self.kube.get(path)).text


class Pulse:
    """Detects pauses of the machine, after which no announcement is fresh."""

    def __init__(self) -> None:
        self.stood_still_at = -math.inf

    async def beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.1)
            if time.monotonic() - before > FRESH_SECONDS / 2:
                self.stood_still_at = time.monotonic()

    async def claimed(self, by: Process, of: Process) -> None:
        """Claim once; a certain cluster must serve it."""
        while True:
            status, made = await by.create()
            if status == 201:
                assert await of.holds(made)
                return
            assert time.monotonic() - self.stood_still_at < 4 * FRESH_SECONDS, status
            await asyncio.sleep(0.3)


async def served(by: Process, of: Process, *, seconds: float = 60) -> None:
    """Claim until a certain cluster serves one."""
    async with asyncio.timeout(seconds):
        while True:
            status, made = await by.create()
            if status == 201 and await of.holds(made):
                return
            await asyncio.sleep(0.3)


async def test_a_control_plane_that_hangs_delays_no_other(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("east", "west", "north")}
    east, west, north = (Process(name, ports, tmp_path / name) for name in ports)
    pulse = Pulse()
    async with east.run(), west.run(), north.run(), background(pulse.beat(), name="pulse"):
        for process in (east, west, north):
            await process.ready()
        await east.give(0)
        await west.give(40)
        await served(east, west)
        await north.give(40)
        await served(east, north, seconds=60)
        os.kill(west.pid, signal.SIGSTOP)
        # It accepts connections and does not reply; its announcement is still fresh for a moment.
        for _ in range(5):
            await pulse.claimed(east, north)
        await asyncio.sleep(FRESH_SECONDS)
        # By then no other cluster calls it or waits for it.
        asked = await east.sent_to("west")
        await pulse.claimed(east, north)
        assert await east.sent_to("west") == asked > 0
        os.kill(west.pid, signal.SIGCONT)
        await served(east, west, seconds=60)
