"""Pushes routes to gateways before the API responds.

A gateway has the route of a sandbox before the client that created it does, and has its pause or
its end before the client gets the response. It has a pause before the sandbox hibernates, too, and
replies with the requests that the pause would interrupt.
"""

from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.claims.ports import Announcer
from paddock.controllers.sandbox.waiting_requests import WaitingRequests
from paddock.gateway.routing.peers import GatewayPeers
from paddock.gateway.routing.routes import Route, route_of
from paddock.kit.clock import Clock
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed

FORGET_SECONDS = 10.0
"""A gateway that has not reported for this long is dropped."""


class GatewayNotifier:
    """Notifies the gateways that report here; one that does not answer is dropped."""

    def __init__(self, seed: TokenSeed, clock: Clock, *, expected: int = 0) -> None:
        """`expected`: how many gateways run, whether or not they have reported yet."""
        self._clock = clock
        self._peers = GatewayPeers(seed, clock)
        self._expected = expected
        self._started = clock.monotonic()
        self._seen: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        """As `_seen`, but with gateways that did not answer: they may serve requests."""

    def register(self, url: str) -> tuple[str, ...]:
        """Record that a gateway reported; return the addresses of all gateways."""
        self._seen[url] = self._reported[url] = self._clock.monotonic()
        self._refresh()
        return self._peers.urls()

    def _refresh(self) -> None:
        limit = self._clock.monotonic() - FORGET_SECONDS
        self._seen = {url: at for url, at in self._seen.items() if at > limit}
        self._reported = {url: at for url, at in self._reported.items() if at > limit}
        self._peers.set_urls(self._seen)

    async def announce(self, sandbox: Sandbox) -> None:
        """Return once every reachable gateway has the route."""
        await self._push(route_of(sandbox, self._clock.now()))

    async def announce_end(self, sandbox: Sandbox, version: str) -> None:
        """Return once every reachable gateway has dropped the route."""
        route = route_of(sandbox, self._clock.now())
        if route is not None:
            route = structs.replace(route, state=SandboxState.DEAD, version=int(version or 0))
        await self._push(route)

    async def has_requests(self, sandbox: Sandbox) -> bool:
        """Announce a pause; return whether requests to the sandbox wait for its end.

        A gateway that reported a moment ago and does not answer may have some, and so may one that
        has not reported since this process started.
        """
        self._refresh()
        route = route_of(sandbox, self._clock.now())
        if route is None:
            return False
        waiting = await self._peers.announce_pause(route)
        is_unknown = self._may_be_unknown() or any(url not in waiting for url in self._reported)
        return is_unknown or any(waiting.values())

    def _may_be_unknown(self) -> bool:
        """Whether gateways may run that have not reported since this process started."""
        if len(self._reported) >= self._expected:
            return False
        return self._clock.monotonic() < self._started + FORGET_SECONDS

    async def _push(self, route: Route | None) -> None:
        if route is None or not self._seen:
            return
        await self._peers.send((route,))
        for url in self._peers.unreachable():
            self._seen.pop(url, None)
        self._refresh()

    def close(self) -> None:
        """Close the connections."""
        self._peers.close()


_: type[Announcer] = GatewayNotifier
_waiting: type[WaitingRequests] = GatewayNotifier
