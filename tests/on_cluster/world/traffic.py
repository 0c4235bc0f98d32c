"""The rig of the gateway scenarios on a cluster: two gateways, and sandboxes that are pods.

`tests/gateway` is written against `tests.gateway.rig.rig`: a gateway in the test's process and
routes put into its table. This one has the same interface. A sandbox is a Sandbox of a real API
server with a pod created by the controllers; a scenario's server listens on that pod's address;
requests go to the gateways in turn, and waking takes the complete path.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.engine.versions import version_of
from paddock.gateway.routing.peers import GatewayPeers
from paddock.gateway.routing.routes import RouteTable
from paddock.kit import clock as clocks
from paddock.kit import ids
from paddock.kit.errors import ConflictError, NotFoundError
from paddock.resources.kinds.pods import Pod
from paddock.resources.kinds.sandbox import (
    FINALIZER_SANDBOX,
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxSpec,
    WakeOnTraffic,
)
from paddock.resources.kinds.template import NetworkPolicy, TemplateRef
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.tokens import hashed
from tests.gateway.rig import SEED, Response, Rig, Serve, Wire
from tests.on_cluster.world.installation import API_KEY, Installation
from tests.on_cluster.world.light_pods import LightKubelet


class DialCounter:
    """Counts connections of gateways to the servers of scenarios."""

    dials = 0

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"it uses the dialer's {name}, which is in another process here")


class ClusterRig(Rig):
    """One scenario's view of the gateways. Only listening and requests of `Rig` are used."""

    def __init__(self, traffic: "Traffic") -> None:
        self._traffic = traffic
        self._stack = contextlib.AsyncExitStack()
        self._handlers = set()
        self.dialer = DialCounter()  # type: ignore[assignment]
        self._woken_before = dict(traffic.kubelet.thaws)
        self._used: dict[str, str] = {}
        """Names of pods by sandbox id of the scenario."""
        self._wires: list[Wire] = []

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"it reads {name}, which is in another process here")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "on_resume":
            pytest.skip("it replaces the control plane, which is real here")
        super().__setattr__(name, value)

    @property
    def port(self) -> int:
        return next(self._traffic.ports)

    @property
    def wakes(self) -> list[str]:
        """Ids of sandboxes whose pods were thawed, once per thaw."""
        thaws = self._traffic.kubelet.thaws
        return [
            sandbox_id
            for sandbox_id, pod in self._used.items()
            for _ in range(thaws[pod] - self._woken_before.get(pod, 0))
        ]

    async def close(self) -> None:
        for wire in self._wires:
            wire.writer.transport.abort()  # also after a skip
        for task in (handlers := tuple(self._handlers)):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await self._stack.aclose()
        # A safe request that failed is retried: it must not reach the next scenario's server.
        await self._traffic.is_quiet()

    async def upstream(
        self, serve: Serve, sandbox_id: str = "abc", port: int = 8000, **changes: Any
    ) -> None:
        if not changes.keys() <= {"state", "wakes", "traffic_token_hash", "mask_host"}:
            pytest.skip(f"it makes up a route: {', '.join(changes)}")
        known = sandbox_id in self._used
        box = await self._traffic.sandbox(sandbox_id, {} if known else changes, keep=known)
        self._used[sandbox_id] = box.metadata.name
        await self._listen_at(serve, box.status.address.ip or "", port)
        if changes.get("state") in (SandboxState.PAUSED, SandboxState.PAUSING):
            await self._traffic.paused(box)

    async def listen(self, serve: Serve) -> int:
        pytest.skip("it replaces the API, which is real here")

    async def _listen_at(self, serve: Serve, address: str, port: int) -> None:
        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.dialer.dials += 1
            self._handlers.add(task)
            try:
                await serve(reader, writer)
            except asyncio.CancelledError:
                writer.transport.abort()
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                self._handlers.discard(task)
                writer.close()

        server = await asyncio.start_server(guarded, address, port, limit=2**22)
        self._stack.push_async_callback(server.wait_closed)
        self._stack.callback(server.close)

    async def request(self, request: bytes, address: str = "127.0.0.1") -> Response:
        answer = await super().request(request, address)
        await self._traffic.thaws_are_known()
        return answer

    async def connect(self, address: str = "127.0.0.1") -> Wire:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=2**22, local_addr=(address, 0)
        )
        self._wires.append(Wire(reader, writer))
        return self._wires[-1]


class Traffic:
    """Sandboxes for the traffic of scenarios; created once and reused."""

    def __init__(self, paddock: Installation) -> None:
        self.paddock = paddock
        kubelet = paddock.kubelet
        assert isinstance(kubelet, LightKubelet)
        self.kubelet = kubelet
        self.ports = _in_turn(paddock.gateway_ports)
        self._names: dict[str, str] = {}
        self._http = aiohttp.ClientSession(headers={"X-API-Key": API_KEY})

    async def close(self) -> None:
        await self._http.close()

    async def is_quiet(self) -> None:
        """Wait until no request to a sandbox is in flight in any gateway."""

        async def nothing_flies() -> bool:
            for url in self.paddock.admin_urls:
                async with self._http.get(f"{url}/sandboxes") as answer:
                    traffic = await answer.json()
                if any(each["in_flight"] for each in traffic.values()):
                    return False
            return True

        await self.paddock.eventually(nothing_flies)

    async def thaws_are_known(self) -> None:
        """Wait until the kubelet, which counts thaws, has seen the current pods."""
        pods = (await self.paddock.store.list(Pod, namespace="default")).items

        async def has_seen_all() -> bool:
            running_pods = [(pod, self.kubelet.running_pods.get(pod.metadata.uid)) for pod in pods]
            return all(
                version_of(life.pod) >= version_of(pod)
                for pod, life in running_pods
                if life is not None
            )

        await self.paddock.eventually(has_seen_all)

    async def sandbox(self, sandbox_id: str, wanted: dict[str, Any], *, keep: bool) -> Sandbox:
        """Return a running sandbox of that id, known to every gateway in its current version."""
        name = self._names.setdefault(sandbox_id, f"{sandbox_id}-{ids.name_suffix()}")
        key = Key("default", name)
        store = self.paddock.store
        try:
            box = await store.get(Sandbox, key)
        except NotFoundError:
            meta = ObjectMeta(name=name, namespace="default", finalizers=(FINALIZER_SANDBOX,))
            spec = _spec(SandboxSpec(template_ref=TemplateRef(name="base")), sandbox_id, wanted)
            await store.create(Sandbox(metadata=meta, spec=spec))
        else:
            spec = box.spec if keep else _spec(box.spec, sandbox_id, wanted)
            if spec != box.spec:
                await self._write(key, spec)
        return await self._settled(key, Phase.RUNNING)

    async def _write(self, key: Key, spec: SandboxSpec) -> None:
        store = self.paddock.store
        while True:
            box = await store.get(Sandbox, key)
            try:
                await store.update(structs.replace(box, spec=spec))
            except ConflictError:
                continue  # the controllers updated its status in between
            return

    async def paused(self, box: Sandbox) -> Sandbox:
        assert box.spec.claim is not None
        url = f"http://127.0.0.1:{self.paddock.api_ports[0]}"
        async with self._http.post(f"{url}/sandboxes/{box.spec.claim.sandbox_id}/pause") as answer:
            assert answer.status == 204, await answer.text()
        return await self._settled(box.key, Phase.PAUSED)

    async def _settled(self, key: Key, phase: Phase) -> Sandbox:
        """Wait until a sandbox has this phase, known to every gateway and API replica."""
        box = Sandbox()

        async def has_settled() -> bool:
            nonlocal box
            box = await self.paddock.store.get(Sandbox, key)
            if box.status.phase is not phase:
                return False
            return await self._is_known(box)

        await self.paddock.eventually(has_settled)
        return box

    async def _is_known(self, box: Sandbox) -> bool:
        assert box.spec.claim is not None
        sandbox_id, version = box.spec.claim.sandbox_id, int(box.metadata.resource_version)
        for url in self.paddock.admin_urls:
            peers, table = GatewayPeers(SEED, clocks.system()), RouteTable(clocks.system())
            peers.set_urls([url])
            await peers.sync(table)
            peers.close()
            route = table.get(sandbox_id)
            if route is None or route.version < version:
                return False
        for port in self.paddock.api_ports:
            url = f"http://127.0.0.1:{port}/_paddock/sandboxes/{sandbox_id}"
            async with self._http.get(url, headers={"Authorization": "Bearer token"}) as answer:
                if answer.status != 200:
                    return False
                shown = await answer.json()
                if int(shown["metadata"]["resourceVersion"]) < version:
                    return False
        return True


def _spec(spec: SandboxSpec, sandbox_id: str, wanted: dict[str, Any]) -> SandboxSpec:
    wakes = WakeOnTraffic(enabled=True, timeout_seconds=300) if wanted.get("wakes") else None
    private = wanted.get("traffic_token_hash", "")
    network = None
    if private or wanted.get("mask_host"):
        network = NetworkPolicy(
            allow_public_traffic=not private, mask_request_host=wanted.get("mask_host")
        )
    claim = ClaimIdentity(
        sandbox_id=sandbox_id,
        owner="default",
        lock=spec.claim.lock if spec.claim else ids.uid(),
        claim_time=spec.claim.claim_time if spec.claim else datetime.now(UTC),
        access_token_hash=hashed(SEED.access_token(sandbox_id)),
        traffic_token_hash=private,
    )
    return structs.replace(spec, claim=claim, paused=False, wake_on_traffic=wakes, network=network)


def _in_turn(ports: list[int]) -> Any:
    while True:
        yield from ports


@contextlib.asynccontextmanager
async def rig_on(traffic: Traffic) -> AsyncGenerator[ClusterRig]:
    """Yield the rig of a scenario."""
    await traffic.thaws_are_known()
    made = ClusterRig(traffic)
    try:
        yield made
    finally:
        await made.close()
