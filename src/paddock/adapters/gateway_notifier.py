"""The control plane's word to gateways: they know a route before its sandbox is handed out, and
that it is paused or gone before whoever asked for that is answered."""

from msgspec import structs

from paddock.api.internal import Report
from paddock.cache.states import SandboxState
from paddock.claims.ports import Announcer
from paddock.gateway.routing.peers import Peers
from paddock.gateway.routing.routes import Route, route_of
from paddock.kit.clock import Clock
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed

FORGET_SECONDS = 10.0
"""A gateway that has not reported for so long is not waited for."""


class Gateways:
    """The gateways that report here. One that does not answer is told nothing until it reports."""

    def __init__(self, seed: TokenSeed, clock: Clock) -> None:
        self._clock = clock
        self._peers = Peers(seed, clock)
        self._seen: dict[str, float] = {}

    def heard(self, report: Report) -> tuple[str, ...]:
        """Take in that a gateway is there; gives all there are."""
        self._seen[report.url] = self._clock.monotonic()
        self._refresh()
        return self._peers.known()

    def _refresh(self) -> None:
        limit = self._clock.monotonic() - FORGET_SECONDS
        self._seen = {url: at for url, at in self._seen.items() if at > limit}
        self._peers.set(self._seen)

    async def announce(self, sandbox: Sandbox) -> None:
        """Return once every reachable gateway knows the route."""
        await self._tell(route_of(sandbox, self._clock.now()))

    async def announce_end(self, sandbox: Sandbox, version: str) -> None:
        """Return once every reachable gateway knows that there is no such route any more."""
        route = route_of(sandbox, self._clock.now())
        if route is not None:
            route = structs.replace(route, state=SandboxState.DEAD, version=int(version or 0))
        await self._tell(route)

    async def _tell(self, route: Route | None) -> None:
        if route is None or not self._seen:
            return
        await self._peers.tell((route,))
        for url in self._peers.silent():
            self._seen.pop(url, None)
        self._refresh()

    def close(self) -> None:
        """Hang up."""
        self._peers.close()


_: type[Announcer] = Gateways
