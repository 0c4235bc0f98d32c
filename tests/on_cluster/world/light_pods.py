"""Lightweight pods: an address each and a fake envd in this process.

For suites about everything around a sandbox. The API server, the controllers, their requests and
the frozen cgroup are real; there are no programs in a pod, so hundreds of pods are just hundreds of
sockets. `tests.cluster.kubelet` runs pods with real processes.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from paddock.resources.kinds.pods import PodManifest
from paddock.runtime.kubernetes import names
from paddock.store.kubernetes import KubernetesStore
from paddock.store.port import Change
from tests.cluster.kubelet import Kubelet

USAGE = json.dumps(
    {
        "cpu_count": 1,
        "cpu_used_pct": 0.0,
        "mem_used": 0,
        "mem_total": 1,
        "mem_cache": 0,
        "disk_used": 0,
        "disk_total": 1,
    }
).encode()


class LightPod:
    """Replaces a pod's processes; ends when it is killed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.settings: dict[str, Any] = {}
        """The last configuration of its envd: token, environment, user."""
        self.running_pods = 1
        """Number of main containers so far."""
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._writers: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []
        self.run: Callable[[], Awaitable[int]] | None = None
        """Handles a command sent to its envd; returns the exit code."""

    async def open(self, ports: tuple[int, ...]) -> None:
        for port in ports:
            self._servers.append(await asyncio.start_server(self._serve, self.address, port))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                _, _, length = head.partition("content-length:")
                body = await reader.readexactly(int(length.split()[0]) if length else 0)
                if head.startswith("post /process.process/start"):
                    writer.write(_ended(0 if self.run is None else await self.run()))
                else:
                    writer.write(self._answer(head, body))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, head: str, body: bytes) -> bytes:
        if head.startswith("get /metrics"):
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(USAGE), USAGE)
        if head.startswith("post /init"):
            self.settings = json.loads(body)
        return b"HTTP/1.1 204 No Content\r\nPaddock-Main: life-%d\r\n\r\n" % self.running_pods

    @property
    def has_ended(self) -> bool:
        """Whether it was killed."""
        return self._ended.done()

    def kill(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()
        if not self._ended.done():
            self._ended.set_result(-9)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)


class LightKubelet(Kubelet):
    """Runs pods as `LightPod`s."""

    ports: tuple[int, ...] = (names.CONTROL_PORT, names.ENVD_PORT)
    """Ports of the fake envds."""

    def __init__(self, store: KubernetesStore) -> None:
        # Images are not used.
        super().__init__(store, None, runs_processes=False)  # type: ignore[arg-type]
        self._runs_processes = True
        self.failing = 0
        """Number of next pods that fail to start."""
        self.start_seconds = 0.0
        """How long a pod takes to start."""
        self.pods: dict[str, LightPod] = {}
        """Pods that ever ran, by the pod's uid."""
        self.thaws: Counter[str] = Counter()
        """Number of thaws of each pod, by name."""
        self._frozen: set[str] = set()
        self.doctor: Callable[[str], Awaitable[int]] | None = None
        """Returns the exit code of a command in a pod of this name; by default 0."""

    async def _ran(self, pod: str) -> int:
        return 0 if self.doctor is None else await self.doctor(pod)

    def _on_change(self, change: Change, pod: PodManifest) -> None:
        super()._on_change(change, pod)
        uid = pod.metadata.uid
        if names.ANNOTATION_FROZEN in pod.metadata.annotations:
            self._frozen.add(uid)
        elif uid in self._frozen:
            self._frozen.discard(uid)
            self.thaws[pod.metadata.name] += 1

    async def _replace_main(self, pod: PodManifest, image: str) -> None:
        light = self.pods[pod.metadata.uid]
        if image:
            light.running_pods += 1
        else:
            light.kill()

    def _make_pod(self, address: str) -> LightPod:
        return LightPod(address)

    async def _start(self, pod: PodManifest, address: str) -> Any:
        await asyncio.sleep(self.start_seconds)
        made = self.pods[pod.metadata.uid] = self._make_pod(address)
        made.run = partial(self._ran, pod.metadata.name)
        self._cgroup(pod.metadata.uid)
        self.processes[pod.metadata.name] = made  # type: ignore[assignment]
        if self.failing:
            self.failing -= 1
            made.kill()
        else:
            await made.open(self.ports)
        return made


class OpenPodKubelet(LightKubelet):
    """Leaves all ports of its pods, including envd's, to the test."""

    ports = (names.CONTROL_PORT,)


def _ended(code: int) -> bytes:
    """Return the end event of a command as a Connect stream."""
    said = json.dumps({"event": {"end": {"exitCode": code, "exited": True}}}).encode()
    frames = b"\0%b%b\2\0\0\0\2{}" % (len(said).to_bytes(4, "big"), said)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\n"
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(frames), frames)
