"""Routes over real HTTP: signed, never replayed, and in sync after a partition."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from msgspec import structs

from paddock.adapters.gateway import admin_server
from paddock.adapters.membership import Membership, PeerService, PeerSetting, parse_peers
from paddock.cache.states import SandboxState
from paddock.claims.requests import NewSandbox
from paddock.gateway.activity import Activity
from paddock.gateway.routing.peers import (
    PATH,
    GatewayPeers,
    MessageVerifier,
    PeerEndpoint,
    RouteUpdate,
    apply_update,
    sign,
)
from paddock.gateway.routing.routes import RouteTable
from paddock.kit import clock as clocks
from paddock.kit.clock import ManualClock
from paddock.kit.errors import InvalidError, UnauthenticatedError
from paddock.resources.kinds.pool import RecycleStrategy, RecycleType, SandboxPool
from paddock.resources.meta import Key
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings
from paddock.store.kubernetes.access import load_access
from paddock.store.kubernetes.client import KubernetesClient
from tests.cluster.info import ClusterInfo
from tests.gateway.rig import SEED, route
from tests.ports import free_ports
from tests.scenario.paddock import CALLER, paddock


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use long timeouts, so that a busy machine does not look like an unreachable gateway."""
    monkeypatch.setattr("paddock.gateway.routing.peers._TIMEOUT_SECONDS", 20.0)


class Member:
    """One gateway as peers see it: a table behind an admin server that can be stopped."""

    def __init__(self, port: int) -> None:
        self.clock = clocks.system()
        self.table = RouteTable(self.clock)
        self.peers = GatewayPeers(SEED, self.clock)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> None:
        desk = PeerEndpoint(self.table, MessageVerifier(SEED, self.clock))
        app = admin_server.create_app(self.table, Activity(), desk, clocks.system())
        await self._stack.enter_async_context(admin_server.serving(app, "127.0.0.1", self.port))

    async def cut_off(self) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def members(count: int) -> AsyncGenerator[list[Member]]:
    made = [Member(port) for port in free_ports(count)]
    for member in made:
        await member.open()
        member.peers.set_urls(other.url for other in made if other is not member)
    try:
        yield made
    finally:
        for member in made:
            member.peers.close()
            await member.cut_off()


async def test_routes_sent_by_one_gateway_reach_all_others() -> None:
    async with members(3) as (one, two, three):
        assert await one.peers.send([route(f"box{number}") for number in range(1200)]) == 2
        assert len(two.table) == len(three.table) == 1200


async def test_a_gateway_has_no_stale_route_after_a_partition() -> None:
    async with members(3) as (one, two, three):
        gone, moved = route("gone", version=5), route("moved", version=5)
        for member in (one, two, three):
            member.table.put(gone)
            member.table.put(moved)
        await three.cut_off()
        for member in (one, two):
            member.table.remove(gone.key, 8)
            member.table.put(route("moved", version=9, incarnation=1))
            member.table.put(route("new", version=10))
        assert await one.peers.send([route("new", version=10)]) == 1
        await three.open()
        one.table.is_ready = True
        assert await three.peers.sync(three.table) == 1
        assert three.table.get("gone") is None
        assert three.table.get("moved").incarnation == 1
        assert three.table.get("new") is not None
        # Its stale routes do not come back to the others.
        assert not three.table.put(gone)
        await one.peers.sync(one.table)
        assert one.table.get("gone") is None
        assert one.table.digest() == two.table.digest() == three.table.digest()


async def test_a_stale_route_from_a_recovered_gateway_is_fenced() -> None:
    async with members(2) as (one, two):
        stale = route("gone", version=5)
        two.table.put(stale)
        one.table.put(stale)
        one.table.remove(stale.key, 6)
        await two.peers.send([stale])
        assert one.table.get("gone") is None


async def test_a_gateway_has_the_new_route_before_the_call_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway has no watch here, only the control plane's announcements."""
    monkeypatch.setattr("paddock.adapters.gateway.gateway_notifier.FORGET_SECONDS", 600.0)
    async with members(1) as (one,), paddock(clock=clocks.system(), pool_size=1) as world:
        world.plane.gateways.register(one.url)

        def seen() -> SandboxState | None:
            found = one.table.get(sandbox_id)
            return None if found is None else found.state

        created = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        assert created.spec.claim is not None
        sandbox_id = created.spec.claim.sandbox_id
        assert seen() is SandboxState.RUNNING
        await world.manager.lifecycle.pause(CALLER, sandbox_id)
        assert seen() is SandboxState.PAUSED
        await world.manager.lifecycle.connect(CALLER, sandbox_id, timeout_seconds=60)
        assert seen() is SandboxState.RUNNING
        await world.manager.lifecycle.pause(CALLER, sandbox_id)
        await world.manager.lifecycle.resume(CALLER, sandbox_id, timeout_seconds=60)
        assert seen() is SandboxState.RUNNING
        await world.manager.lifecycle.kill(CALLER, sandbox_id)
        assert seen() is None
        assert one.table.has_ended(sandbox_id)
        created = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        assert created.spec.claim is not None
        sandbox_id = created.spec.claim.sandbox_id
        await world.manager.lifecycle.set_timeout(CALLER, sandbox_id, timeout_seconds=0)
        assert seen() is None


async def test_a_gateway_drops_the_route_of_a_recycled_sandbox_before_kill_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paddock.adapters.gateway.gateway_notifier.FORGET_SECONDS", 600.0)
    async with members(1) as (one,), paddock(clock=clocks.system(), pool_size=1) as world:
        world.plane.gateways.register(one.url)
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await world.provider.write.mutate(
            SandboxPool,
            world.pool().key,
            lambda pool: structs.replace(
                pool, spec=structs.replace(pool.spec, recycle_strategy=strategy)
            ),
        )
        await world.stocked(1)
        created = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        assert created.spec.claim is not None
        assert one.table.get(created.spec.claim.sandbox_id) is not None
        await world.manager.lifecycle.kill(CALLER, created.spec.claim.sandbox_id)
        back = world.provider.sandbox(created.key)
        assert back is not None
        assert back.spec.claim is None
        assert one.table.get(created.spec.claim.sandbox_id) is None


async def test_of_two_versions_of_a_route_only_the_newer_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with members(2) as (one, two):
        (peer,) = one.peers._by_url.values()
        async with peer._lock:
            # Both wait for the same batch; the older version comes last.
            late = [
                asyncio.create_task(peer.send([route(version=6, state=SandboxState.PAUSED)])),
                asyncio.create_task(peer.send([route(version=5)])),
            ]
            await asyncio.sleep(0)
        await asyncio.gather(*late)
        assert two.table.get("abc").state is SandboxState.PAUSED


async def test_an_unreachable_peer_causes_a_short_delay_only() -> None:
    async with members(3) as (one, two, three):
        await three.cut_off()
        async with asyncio.timeout(15):
            assert await one.peers.send([route()]) == 1
        assert one.peers.unreachable() == (three.url,)
        assert two.table.get("abc") is not None


async def test_a_message_is_accepted_once_and_only_from_this_installation() -> None:
    async with members(1) as (member,), aiohttp.ClientSession() as session:
        body = msgspec.msgpack.encode(RouteUpdate(routes=(route(),)))
        now = member.clock.now().timestamp()

        async def post(headers, data=body) -> int:
            async with session.post(member.url + PATH, data=data, headers=headers) as response:
                return response.status

        good = sign(SEED, "POST", body, now=now, nonce="n1")
        assert await post({}) == 401
        assert await post(sign(TokenSeed(b"other"), "POST", body, now=now, nonce="n2")) == 401
        assert await post(good, body + b"x") == 401
        assert await post(sign(SEED, "PUT", body, now=now, nonce="n3")) == 401
        assert await post(sign(SEED, "POST", body, now=now - 60, nonce="n4")) == 401
        assert await post(sign(SEED, "POST", body, now=now + 60, nonce="n5")) == 401
        assert member.table.get("abc") is None
        assert await post(good) == 204
        assert member.table.get("abc") is not None
        assert await post(good) == 401
        garbage = b"\xff garbage"
        assert await post(sign(SEED, "POST", garbage, now=now, nonce="n6"), garbage) == 400


def test_nonces_are_forgotten_when_their_messages_have_expired() -> None:
    clock = ManualClock()
    keeper = MessageVerifier(SEED, clock)
    for number in range(100):
        now = clock.now().timestamp()
        keeper.check("POST", sign(SEED, "POST", b"", now=now, nonce=str(number)), b"")
        clock.advance(10)
    assert len(keeper._seen) < 10
    with pytest.raises(UnauthenticatedError):
        keeper.check("POST", {}, b"")


def test_fences_in_an_update_apply_before_routes() -> None:
    table = RouteTable(ManualClock())
    other = RouteTable(ManualClock())
    other.put(route(version=3))
    other.remove(Key("default", "abc"), 4)
    apply_update(table, RouteUpdate(routes=(route(version=3),), tombstones=other.tombstones()))
    assert table.get("abc") is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", PeerSetting()),
        ("http://a:1/, http://b:2", PeerSetting(frozenset({"http://a:1", "http://b:2"}))),
        ("dns:gateways.paddock.svc:7789", PeerSetting(names=(("gateways.paddock.svc", 7789),))),
        (
            "kubernetes:ns/gateways:3002",
            PeerSetting(services=(PeerService("ns", "gateways", 3002),)),
        ),
    ],
)
def test_peers_are_named_by_address_or_by_name(setting: str, expected) -> None:
    assert parse_peers(setting) == expected


@pytest.mark.parametrize(
    "setting",
    [
        *("a:1", "http://a:70000", "http://[a", "dns:a", "dns::1", "dns:a:b"),
        *("kubernetes:a:1", "kubernetes:a/:1", "kubernetes:a/b"),
    ],
)
def test_an_invalid_peers_setting_is_refused(setting: str) -> None:
    with pytest.raises(InvalidError, match="peers"):
        parse_peers(setting)


def test_peer_services_need_a_kubernetes_store() -> None:
    settings = Settings(peers="kubernetes:ns/gateways:3002")
    with pytest.raises(InvalidError, match="expected"):
        parse_peers(settings.peers, takes_services=False)
    with pytest.raises(InvalidError, match="store"):
        Membership(settings, GatewayPeers(SEED, clocks.system()), own_url="http://a:1")


def endpoints(name: str, service: str, *found: tuple[str, dict[str, bool]]) -> dict[str, object]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv6" if ":" in found[0][0] else "IPv4",
        "endpoints": [
            {"addresses": [address], "conditions": conditions} for address, conditions in found
        ],
        "ports": [{"port": 3002}],
    }


@pytest.mark.kubernetes
async def test_peers_are_the_endpoints_of_a_service_in_a_real_cluster(
    kube_cluster: ClusterInfo,
) -> None:
    base = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    made = [
        endpoints("peers-a", "peers", ("10.0.0.1", {"ready": True}), ("10.0.0.2", {})),
        endpoints("peers-b", "peers", ("10.0.0.3", {"ready": False, "terminating": True})),
        endpoints("peers-c", "peers", ("fd00::1", {"ready": False})),
        endpoints("others", "others", ("10.0.0.9", {"ready": True})),
    ]
    for item in made:
        kube_cluster.request("POST", base, item)
    client = KubernetesClient(load_access(Path(kube_cluster.kubeconfig)))
    peers = GatewayPeers(SEED, clocks.system())
    membership = Membership(
        Settings(peers="kubernetes:default/peers:3002"),
        peers,
        own_url="http://10.0.0.1:3002",
        cluster=client,
    )
    try:
        await membership._resolve()
        assert set(peers.urls()) == {"http://10.0.0.2:3002", "http://[fd00::1]:3002"}
        kube_cluster.request("DELETE", f"{base}/peers-c")
        await membership._resolve()
        assert peers.urls() == ("http://10.0.0.2:3002",)
        # An API server that is down does not remove peers.
        await client.close()
        await membership._resolve()
        assert peers.urls() == ("http://10.0.0.2:3002",)
    finally:
        await client.close()
        for item in (made[0], made[1], made[3]):
            kube_cluster.request("DELETE", f"{base}/{item['metadata']['name']}")
