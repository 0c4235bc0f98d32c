"""The control plane's word to gateways: a route is known there before its sandbox is handed out."""

from paddock.api.internal import Report
from paddock.gateway.peers import Peers
from paddock.gateway.routes import route_of
from paddock.kit.clock import Clock
from paddock.kit.tokens import TokenSeed
from paddock.manager.ports import Announcer
from paddock.resources.sandbox import Sandbox

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
        route = route_of(sandbox, self._clock.now())
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
