"""The leader polls the traffic of sandboxes from gateways, some of which come and go."""

from contextlib import AsyncExitStack

import pytest

from paddock.adapters.gateway import admin_server
from paddock.adapters.gateway.activity_poller import ActivityPoller
from paddock.adapters.membership import PeerSetting
from paddock.gateway.activity import Activity
from paddock.gateway.routing.peers import MessageVerifier, PeerEndpoint
from paddock.gateway.routing.routes import RouteTable
from paddock.kit.clock import ManualClock
from paddock.resources.tokens import TokenSeed
from tests.ports import free_port


class Gateways:
    """Gateways that only count traffic, each on its own port."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._stacks: dict[str, AsyncExitStack] = {}
        self.activities: dict[str, Activity] = {}

    async def start(self, port: int = 0) -> str:
        activity, routes = Activity(), RouteTable(self.clock)
        endpoint = PeerEndpoint(routes, MessageVerifier(TokenSeed(b"seed"), self.clock))
        app = admin_server.create_app(routes, activity, endpoint, self.clock)
        stack = AsyncExitStack()
        url = await stack.enter_async_context(admin_server.serving(app, "127.0.0.1", port))
        self._stacks[url], self.activities[url] = stack, activity
        return url

    async def stop(self, url: str) -> None:
        await self._stacks.pop(url).aclose()

    def request(self, url: str, uid: str, *, lasts: bool = False) -> None:
        counted = self.activities[url].get_or_create(uid, f"id-{uid}")
        counted.last_active = self.clock.monotonic()
        counted.in_flight += lasts

    async def close(self) -> None:
        for stack in self._stacks.values():
            await stack.aclose()


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gateways = Gateways(self.clock)

    def poller(self, *urls: str) -> ActivityPoller:
        self.traffic = ActivityPoller(PeerSetting(urls=frozenset(urls)), None, self.clock)
        return self.traffic

    def ago(self, uid: str) -> float | None:
        last = self.traffic.last(uid)
        return None if last is None else round((self.clock.now() - last).total_seconds(), 3)

    @property
    def known_for(self) -> float:
        return (self.clock.now() - self.traffic.since()).total_seconds()


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch):
    # The clock is manual, the gateways are real: a slow machine must not cause a timeout.
    monkeypatch.setattr("paddock.adapters.gateway.activity_poller.POLL_TIMEOUT_SECONDS", 60.0)
    made = World()
    yield made
    await made.traffic.close()
    await made.gateways.close()


async def test_the_latest_request_through_any_gateway_counts(world: World) -> None:
    one, two = await world.gateways.start(), await world.gateways.start()
    traffic = world.poller(one, two)
    world.gateways.request(one, "a")
    world.clock.advance(20)
    world.gateways.request(two, "a")
    world.gateways.request(two, "b")
    world.clock.advance(5)
    await traffic.refresh()
    assert [world.ago(uid) for uid in ("a", "b", "c")] == [5, 5, None]
    assert world.known_for == 0, "nothing is known from before the first poll"
    world.clock.advance(30)
    world.gateways.request(one, "b")
    await traffic.refresh()
    assert [world.ago(uid) for uid in ("a", "b")] == [35, 0]
    assert world.known_for == 30


async def test_a_request_in_flight_is_activity_now(world: World) -> None:
    url = await world.gateways.start()
    traffic = world.poller(url)
    world.gateways.request(url, "a", lasts=True)
    for _ in range(3):
        world.clock.advance(100)
        await traffic.refresh()
        assert world.ago("a") == 0


async def test_the_counts_of_a_lost_gateway_are_unknown(world: World) -> None:
    one, two = await world.gateways.start(), await world.gateways.start()
    traffic = world.poller(one, two)
    await traffic.refresh()
    world.clock.advance(30)
    await world.gateways.stop(two)
    await traffic.refresh()
    assert world.known_for == 0
    world.clock.advance(30)
    await traffic.refresh()
    assert world.known_for == 0, "as long as it is expected and does not answer"


async def test_a_restarted_gateway_has_lost_its_counts(world: World) -> None:
    port = free_port()
    url = await world.gateways.start(port)
    traffic = world.poller(url)
    await traffic.refresh()
    world.clock.advance(30)
    await traffic.refresh()
    assert world.known_for == 30
    await world.gateways.stop(url)
    world.clock.advance(4)
    assert await world.gateways.start(port) == url
    world.clock.advance(1)
    await traffic.refresh()
    assert world.known_for == 0
    world.clock.advance(10)
    await traffic.refresh()
    world.clock.advance(10)
    assert world.known_for == 10


async def test_without_gateways_nothing_is_known_and_deleted_sandboxes_are_forgotten(
    world: World,
) -> None:
    traffic = world.poller()
    await traffic.refresh()
    world.clock.advance(1000)
    assert world.known_for == 0
    url = await world.gateways.start()
    traffic = world.poller(url)
    world.gateways.request(url, "a")
    await traffic.refresh()
    assert world.ago("a") == 0
    traffic.forget("a")
    assert world.ago("a") is None
