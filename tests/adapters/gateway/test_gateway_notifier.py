"""Pauses are announced over real HTTP to gateways that know the requests in flight."""

import contextlib
from collections.abc import AsyncGenerator

import pytest
from msgspec import structs

from paddock.adapters.gateway import admin_server
from paddock.adapters.gateway.gateway_notifier import FORGET_SECONDS, GatewayNotifier
from paddock.cache.states import SandboxState
from paddock.gateway.activity import Activity
from paddock.gateway.routing.peers import MessageVerifier, PeerEndpoint
from paddock.gateway.routing.routes import RouteTable, route_of
from paddock.kit import clock as clocks
from paddock.kit.clock import ManualClock
from paddock.resources.kinds.sandbox import (
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.meta import ObjectMeta
from paddock.resources.tokens import TokenSeed

SEED = TokenSeed(b"seed")
CLOCK = clocks.system()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use long timeouts, so that a busy machine does not look like an unreachable gateway."""
    monkeypatch.setattr("paddock.gateway.routing.peers._TIMEOUT_SECONDS", 20.0)


def sandbox(version: int, phase: Phase) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(
            name="abc", namespace="default", uid="uid", resource_version=str(version)
        ),
        spec=SandboxSpec(
            paused=phase is not Phase.RUNNING,
            claim=ClaimIdentity(
                sandbox_id="abc", owner="team", lock="lock", claim_time=CLOCK.now()
            ),
        ),
        status=SandboxStatus(phase=phase),
    )


class Gateway:
    """The admin server of a gateway, with its route table and traffic."""

    def __init__(self) -> None:
        self.routes = RouteTable(CLOCK)
        self.activity = Activity()
        self.url = ""
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> None:
        endpoint = PeerEndpoint(self.routes, MessageVerifier(SEED, CLOCK))
        app = admin_server.create_app(self.routes, self.activity, endpoint, CLOCK)
        self.url = await self._stack.enter_async_context(admin_server.serving(app, "127.0.0.1", 0))

    async def close(self) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def gateways(count: int) -> AsyncGenerator[list[Gateway]]:
    made = [Gateway() for _ in range(count)]
    for one in made:
        await one.open()
    try:
        yield made
    finally:
        for one in made:
            await one.close()


async def test_a_pause_is_announced_and_waiting_requests_are_reported() -> None:
    async with gateways(2) as (first, second):
        notifier = GatewayNotifier(SEED, CLOCK)
        for one in (first, second):
            notifier.register(one.url)
            runs = route_of(sandbox(1, Phase.RUNNING), CLOCK.now())
            assert runs is not None
            one.routes.put(structs.replace(runs, state=SandboxState.RUNNING))
        assert not await notifier.has_requests(sandbox(2, Phase.PAUSING))
        for one in (first, second):
            found = one.routes.get("abc")
            assert found is not None
            assert found.state is SandboxState.PAUSING
        second.activity.get_or_create("uid", "abc").in_flight = 1
        assert await notifier.has_requests(sandbox(2, Phase.PAUSING))
        second.activity.get_or_create("uid", "abc").in_flight = 0
        assert not await notifier.has_requests(sandbox(3, Phase.PAUSED))
        notifier.close()


async def test_a_gateway_that_does_not_answer_may_have_requests_until_it_is_forgotten() -> None:
    clock = ManualClock()
    async with gateways(1) as [gateway]:
        notifier = GatewayNotifier(SEED, clock)
        notifier.register(gateway.url)
        await gateway.close()
        assert await notifier.has_requests(sandbox(2, Phase.PAUSING))
        # An announcement drops it, but it may still serve requests.
        await notifier.announce(sandbox(2, Phase.PAUSING))
        assert await notifier.has_requests(sandbox(2, Phase.PAUSING))
        clock.advance(FORGET_SECONDS + 1)
        assert not await notifier.has_requests(sandbox(2, Phase.PAUSING))
        notifier.close()


async def test_gateways_that_have_not_reported_since_the_start_may_have_requests() -> None:
    clock = ManualClock(CLOCK.now())  # messages carry the time
    async with gateways(2) as (first, second):
        notifier = GatewayNotifier(SEED, clock, expected=2)
        assert await notifier.has_requests(sandbox(2, Phase.PAUSING))
        notifier.register(first.url)
        assert await notifier.has_requests(sandbox(2, Phase.PAUSING))
        # Those that have reported know of the pause all the same.
        assert first.routes.get("abc") is not None
        notifier.register(second.url)
        assert not await notifier.has_requests(sandbox(2, Phase.PAUSING))
        notifier.close()


async def test_gateways_that_never_report_are_not_awaited_for_long() -> None:
    clock = ManualClock()
    notifier = GatewayNotifier(SEED, clock, expected=2)
    clock.advance(FORGET_SECONDS - 1)
    assert await notifier.has_requests(sandbox(2, Phase.PAUSING))
    clock.advance(1)
    assert not await notifier.has_requests(sandbox(2, Phase.PAUSING))


async def test_without_gateways_no_request_waits() -> None:
    notifier = GatewayNotifier(SEED, CLOCK)
    assert not await notifier.has_requests(sandbox(2, Phase.PAUSING))
