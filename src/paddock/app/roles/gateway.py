"""The `gateway` role: traffic to sandboxes.

Routes come from a watch on the control plane and from peers, network namespaces from the node.
"""

import asyncio
import contextlib
import gc
import logging
import resource
from collections.abc import Callable
from functools import partial

from paddock.adapters.dialer import LocalDialer
from paddock.adapters.gateway import admin_server
from paddock.adapters.gateway.control_client import ControlClient
from paddock.adapters.membership import Membership
from paddock.api.internal import GatewayReport
from paddock.api.kube.verbs.read import STORED
from paddock.app.wiring import backends
from paddock.app.wiring.secrets import Secrets, load_or_create, token_seed
from paddock.cache.provider import Provider
from paddock.engine.informer import Filter
from paddock.gateway.activity import Activity
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.http.sender import Sender
from paddock.gateway.limits import KEEPALIVE_OPTIONS, GatewayLimits, GatewayOptions
from paddock.gateway.routing.hops import GatewayHops
from paddock.gateway.routing.peers import GatewayPeers, MessageVerifier, PeerEndpoint
from paddock.gateway.routing.route_lookup import RouteLookup
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.gateway.service import Gateway
from paddock.gateway.signing import Signatures
from paddock.gateway.waking.waker import Waker
from paddock.installation.reloading import KeyringFollower
from paddock.kit import clock as clocks
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings
from paddock.store.kubernetes.access import Access
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.kubernetes.client import JSON, ClientSettings
from paddock.store.kubernetes.credentials import StaticCredential
from paddock.store.port import Store

log = logging.getLogger(__name__)

REPORT_SECONDS = 2.0
SWEEP_SECONDS = 5.0
DRAIN_SECONDS = 3.0
"""How long requests in flight may continue when the gateway stops."""


async def run(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Run one gateway process until `stop` is set."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    secrets = load_or_create(settings)
    seed = token_seed(secrets)
    clock = clocks.system()
    base = f"http://{settings.api_host}:{settings.api_port}"
    store = await _open_store(settings, base, secrets.token)
    control = ControlClient(base, secrets.token, clock)
    peers = GatewayPeers(seed, clock)
    routes = RouteTable(clock)
    only = Filter(namespace=settings.namespace or None)
    provider = Provider.for_gateway(store, filters={Sandbox: only}, clock=clock)
    provider.informer(Sandbox).subscribe(routes.observe)
    activity = Activity()
    metrics.REGISTRY.register(activity)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        stack.push_async_callback(control.close)
        stack.callback(peers.close)
        endpoint = PeerEndpoint(routes, MessageVerifier(seed, clock))
        url = await stack.enter_async_context(
            admin_server.serving(
                admin_server.create_app(routes, activity, endpoint, clock),
                settings.admin_host,
                settings.admin_port,
            )
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        gateway = build(
            settings, seed, routes, control, peers, activity, clock, tasks,
            secrets=(secrets.token, secrets.api_key),
        )  # fmt: skip
        cluster = store.client if isinstance(store, KubernetesStore) else None
        if settings.store != "kubernetes":
            # The store is a client of our own API, which has no Services.
            cluster = None
        membership = Membership(settings, peers, own_url=url, cluster=cluster)
        background = [
            tasks.create_task(provider.serve(), name="routes"),
            *_follow_keyring(settings, secrets, seed, tasks),
            tasks.create_task(_first_sync(provider, routes), name="first sync"),
            tasks.create_task(_sweep(gateway), name="sweep"),
            tasks.create_task(_report(activity, control, membership, clock), name="reports"),
            tasks.create_task(membership.keep_caught_up(routes), name="peers"),
        ]
        servers = await _listen(settings, gateway)
        on_ready()
        # Requests leave no reference cycles and routes live long: collect garbage rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        await stop.wait()
        for server in servers:
            server.close()
        await gateway.clients.drain(DRAIN_SECONDS)
        for task in background:
            task.cancel()


def _follow_keyring(
    settings: Settings, secrets: Secrets, seed: TokenSeed, tasks: asyncio.TaskGroup
) -> list[asyncio.Task[None]]:
    """Follow the file of the keyring; on a cluster, settings hold the secrets."""
    if settings.store == "kubernetes":
        return []
    load = partial(load_or_create, settings)
    follower = KeyringFollower(settings.keyring, load, secrets, seed)
    return [tasks.create_task(follower.run(), name="keyring file")]


async def _open_store(settings: Settings, base: str, token: str) -> Store:
    """Open the source of routes: the cluster, or the declarative API of the control plane."""
    if settings.store == "kubernetes":
        return await backends.open_store(settings)
    return KubernetesStore.open(
        Access(server=base, credential=StaticCredential.bearer(token)),
        ClientSettings(accept=f"{JSON};as={STORED},{JSON}"),
    )


async def _listen(settings: Settings, gateway: Gateway) -> list[asyncio.Server]:
    """Listen for clients and, if TLS is served, for Envoy."""
    loop = asyncio.get_running_loop()
    addresses = [(settings.host, settings.port, False)]
    if settings.tls_certificate:
        addresses.append(("127.0.0.1", settings.front_port, True))
    servers = [
        await loop.create_server(
            partial(ClientConnection, gateway, trusts_forwarded=trusts),
            host,
            port,
            reuse_port=True,
            backlog=4096,
        )
        for host, port, trusts in addresses
    ]
    for opened in (item for server in servers for item in server.sockets):
        for option in KEEPALIVE_OPTIONS:
            # Accepted connections inherit the options of their listener.
            opened.setsockopt(*option)
    return servers


def build_limits(settings: Settings) -> GatewayLimits:
    """Return the limits of a gateway in this process."""
    return GatewayLimits(
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address,
        first_byte_seconds=settings.first_byte_seconds,
        pause_grace_seconds=settings.pause_grace_seconds,
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def build(
    settings: Settings,
    seed: TokenSeed,
    routes: RouteTable,
    control: ControlClient,
    peers: GatewayPeers,
    activity: Activity,
    clock: Clock,
    tasks: asyncio.TaskGroup,
    secrets: tuple[str, ...] = (),
) -> Gateway:
    """Wire a gateway."""
    limits = build_limits(settings)
    options = GatewayOptions(
        wakes=settings.wake_on_traffic,
        trusts_forwarded=settings.trust_forwarded,
        logs_requests=settings.access_log,
    )
    dialer = LocalDialer(settings)
    routes.on_change(dialer.forget)

    async def resume(route: Route) -> Route:
        resumed = await control.resume(route)
        tasks.create_task(peers.send((resumed,)), name="send route to peers")
        return resumed

    return Gateway(
        routes=routes,
        waker=Waker(routes, resume, tasks, activity, timeout_seconds=settings.wake_timeout_seconds),
        lookup=RouteLookup(routes, control.fetch_route, clock, tasks),
        sender=Sender(
            dialer, routes, clock, limits=limits, options=options, hops=GatewayHops(seed)
        ),
        signatures=Signatures(routes, seed, clock),
        activity=activity,
        clock=clock,
        tasks=tasks,
        limits=limits,
        options=options,
        secrets=secrets,
    )


async def _first_sync(provider: Provider, routes: RouteTable) -> None:
    await provider.informer(Sandbox).wait_synced()
    routes.is_ready = True
    log.info("gateway is serving", extra=fields(routes=len(routes)))


async def _sweep(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        gateway.sweep()


async def _report(
    activity: Activity, control: ControlClient, membership: Membership, clock: Clock
) -> None:
    while True:
        seen = activity.drain(clock.monotonic())
        others = await control.report(GatewayReport(url=membership.own_url, seen=seen))
        if others is not None:
            membership.set_reported(others)
        await asyncio.sleep(REPORT_SECONDS)
