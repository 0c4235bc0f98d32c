"""Several control planes with their gateways on loopback, and ways to partition them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import httpx

from paddock.adapters.gateway.control_client import ControlClient
from paddock.app.roles.control_plane import ControlPlane
from paddock.app.roles.gateway import build
from paddock.app.wiring import default_resources
from paddock.app.wiring.http_server import AsgiServer, listen
from paddock.app.wiring.secrets import Secrets
from paddock.gateway.activity import Activity
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.routing.peers import GatewayPeers
from paddock.gateway.routing.routes import RouteTable
from paddock.kit import clock as clocks
from paddock.kit.tasks import background
from paddock.manager.environments.member_choice import MemberCandidate
from paddock.resources.kinds.env import EnvMember, ScalingGroup
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Address
from paddock.runtime.simulated import SimulatedRuntime
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from tests.controllers.env.make import ENV, environment
from tests.ports import free_port

SEED = "the same for all"
KEYS = {name: "e2b_" + sign * 40 for name, sign in (("a", "a"), ("b", "b"), ("c", "c"))}


class OnLoopback(SimulatedRuntime):
    """Simulated sandboxes whose ports are on this machine."""

    def _address(self, uid: str, number: int) -> Address:
        return Address(ip="127.0.0.1")


class Cluster:
    """One control plane, its gateway, and a client of its API."""

    def __init__(self, name: str, ports: dict[str, tuple[int, int]], **settings) -> None:
        self.name = name
        self.api_port, self.port = ports[name]
        peers = ",".join(
            f"{other}=http://127.0.0.1:{api}" for other, (api, _) in ports.items() if other != name
        )
        self.settings = Settings(
            cluster_id=name,
            host="127.0.0.1",
            port=self.port,
            api_port=self.api_port,
            pool_size=0,
            federation_peers=peers,
            **settings,
        )
        clock = clocks.system()
        self.runtime = OnLoopback(clock=clock)
        secrets = Secrets(seed=SEED, token=f"token of {name}", api_key=KEYS[name])
        self.plane = ControlPlane(
            self.settings,
            secrets,
            store=MemoryStore(clock=clock),
            runtime=self.runtime,
            clock=clock,
        )
        self.secrets = secrets
        self._server: AsgiServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.api = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.api_port}",
            headers={"X-API-Key": KEYS[name]},
            timeout=30,
        )

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator["Cluster"]:
        plane = self.plane
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(plane.provider.run())
            await default_resources.ensure(
                plane.store, plane.keyring, self.settings, KEYS[self.name]
            )
            for name, work in plane.work().items():
                await stack.enter_async_context(background(work, name=name))
            stack.callback(plane.gateways.close)
            stack.push_async_callback(self.api.aclose)
            stack.push_async_callback(self.cut_off)
            await self.connect()
            await stack.enter_async_context(self._gateway())
            yield self

    async def connect(self) -> None:
        """End the partition: accept connections again."""
        ready = asyncio.Event()
        listener = listen("127.0.0.1", self.api_port)
        self._listener = listener
        self._server = AsgiServer(self.plane.application(), listener, ready.set)
        self._serving = asyncio.create_task(self._server.run_until_stopped())
        await ready.wait()

    async def cut_off(self) -> None:
        """Start a partition: accept no connections; the process continues."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._serving
            self._listener.close()
            self._server = self._serving = None

    @contextlib.asynccontextmanager
    async def _gateway(self) -> AsyncGenerator[None]:
        clock, seed = clocks.system(), TokenSeed(SEED.encode())
        routes = RouteTable(clock)
        self.plane.provider.informer(Sandbox).subscribe(routes.observe)
        routes.is_ready = True
        base = f"http://127.0.0.1:{self.api_port}"
        control = ControlClient(base, self.secrets.token, clock)
        peers = GatewayPeers(seed, clock)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(control.close)
            stack.callback(peers.close)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            gateway = build(self.settings, seed, routes, control, peers, Activity(), clock, tasks)
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                lambda: ClientConnection(gateway), "127.0.0.1", self.port
            )
            try:
                yield
            finally:
                server.close()
                gateway.clients.close()
                await server.wait_closed()

    async def give(self, members: dict[str, EnvMember], group: ScalingGroup | None = None) -> None:
        """Create the environment as seen by this cluster."""
        env = environment(members, group=group, cluster=self.name)
        await self.plane.provider.write.create(env)

    async def create(self, **body) -> httpx.Response:
        return await self.api.post("/sandboxes", json={"templateID": "agents", **body})

    def knows(self, other: str) -> bool:
        """Whether this cluster sees idle sandboxes in another."""
        return any(item.cluster == other and item.can_serve for item in self.elsewhere())

    def sees(self, other: str, idle: int) -> bool:
        """Whether this cluster sees this many idle sandboxes in another."""
        return sum(item.idle for item in self.elsewhere() if item.cluster == other) == idle

    def here(self) -> tuple[MemberCandidate, ...]:
        """The members of this cluster, as its claim queue sees them."""
        return self.plane.environments.claim_queue.candidates(ENV)

    def elsewhere(self) -> tuple[MemberCandidate, ...]:
        """The members of other clusters, as known to this one."""
        parts = self.plane.federation
        assert parts is not None
        return parts.federation.candidates(ENV)

    def sandbox(self, sandbox_id: str) -> Sandbox | None:
        return self.plane.provider.claimed_sandbox(sandbox_id)


async def until(condition, *, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def clusters(*names: str, **settings) -> AsyncGenerator[tuple[Cluster, ...]]:
    ports = {name: (free_port(), free_port()) for name in names}
    made = tuple(Cluster(name, ports, **settings) for name in names)
    async with contextlib.AsyncExitStack() as stack:
        for cluster in made:
            await stack.enter_async_context(cluster.run())
        yield made
