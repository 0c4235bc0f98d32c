"""Requests under way, by the sandbox that they are for, and what its life has in store for them.

Who ends takes its requests along. Who is paused breaks its streams off; a request that was just
on its way in is carried over the pause, where traffic wakes that sandbox. Nothing goes on over a
connection to an earlier life.
"""

from collections.abc import Callable, Coroutine
from hmac import compare_digest
from typing import Any

from paddock.cache.states import SandboxState
from paddock.gateway.activity import Activity, SandboxTraffic
from paddock.gateway.http import error_responses
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.http.sender import Sender
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.gateway.waking.held_requests import HeldRequests

Spawn = Callable[[Exchange, Coroutine[Any, Any, None], str], None]
"""Lets work go on for an exchange, and end with it."""


class InflightRequests:
    """Everything that sandboxes are being asked."""

    def __init__(
        self,
        *,
        routes: RouteTable,
        sender: Sender,
        holds: HeldRequests,
        activity: Activity,
        spawn: Spawn,
        now: Callable[[], float],
        limits: GatewayLimits,
        options: GatewayOptions,
    ) -> None:
        self._routes = routes
        self._sender = sender
        self._held = holds
        self._activity = activity
        self._spawn = spawn
        self._now = now
        self._limits = limits
        self._options = options
        self.in_flight: dict[str, set[Exchange]] = {}
        """By sandbox uid."""
        routes.on_change(self._route_changed)

    def begin(self, exchange: Exchange, route: Route) -> bool:
        """Take in a request that may go on; says whether there is room for it."""
        in_flight = self.in_flight.get(route.uid)
        if in_flight is None:
            in_flight = self.in_flight[route.uid] = set()
        elif len(in_flight) >= self._room(exchange, route):
            exchange.fail(429, "too many requests to this sandbox at once", retry_after_seconds=1)
            return False
        track(exchange, route, self._activity.get_or_create(route.uid, route.id), in_flight)
        return True

    def _room(self, exchange: Exchange, route: Route) -> int:
        shown = exchange.head.access_token_hash
        if shown and compare_digest(shown, route.access_token_hash):
            return self._limits.requests_per_sandbox + self._limits.requests_reserved
        return self._limits.requests_per_sandbox

    def end(self, exchange: Exchange, route: Route, traffic: SandboxTraffic, status: int) -> float:
        """Take in that one is over; gives how long it took."""
        in_flight = self.in_flight.get(route.uid)
        if in_flight is not None:
            in_flight.discard(exchange)
        finished = self._now()
        seconds = finished - exchange.started
        traffic.in_flight -= 1
        traffic.last_active = finished
        traffic.seconds += seconds
        traffic.request_bytes += exchange.request_bytes
        traffic.response_bytes += exchange.response_bytes
        if status >= 500:
            traffic.errors += 1
        return seconds

    def apply_missed_change(self, exchange: Exchange, route: Route) -> None:
        """Do for one request what was done for all others while its connection was being made."""
        current = self._routes.get(route.id)
        if exchange.upstream is None or current is None or current.uid != route.uid:
            return
        if current.incarnation != route.incarnation:
            exchange.abort()
        elif current.state in (SandboxState.PAUSING, SandboxState.PAUSED):
            if self._options.wakes and current.wakes:
                self._spawn(exchange, self._wait_until_running(exchange, current), "carry over")
            else:
                exchange.abort()

    def _route_changed(self, old: Route | None, new: Route | None) -> None:
        """Cut off what belongs to a life that is over."""
        if old is None:
            return
        if new is None or new.uid != old.uid:
            self._sender.drop(old.uid)
            for exchange in tuple(self.in_flight.get(old.uid, ())):
                if exchange.upstream is not None:
                    exchange.abort()
                else:
                    exchange.fail(502, error_responses.NOT_FOUND)
            self._activity.forget(old.uid)
            self.in_flight.pop(old.uid, None)
        elif new.incarnation != old.incarnation:
            self._sender.drop(old.uid)
            self._abort_upstream(old.uid, keep_young=False)
        elif old.state is SandboxState.RUNNING and new.state in (
            SandboxState.PAUSING,
            SandboxState.PAUSED,
        ):
            self._sender.drop(old.uid)
            self._abort_upstream(old.uid, keep_young=self._options.wakes and new.wakes)
            self._hold_over_pause(new)

    def _abort_upstream(self, uid: str, *, keep_young: bool) -> None:
        """Break off what a sandbox was sent, save requests that came while it was being paused."""
        limit = self._now() - self._limits.pause_grace_seconds
        for exchange in tuple(self.in_flight.get(uid, ())):
            is_young = exchange.started >= limit and not _is_stream(exchange)
            if exchange.upstream is not None and not (keep_young and is_young):
                exchange.abort()

    def _hold_over_pause(self, route: Route) -> None:
        """Wake a sandbox that was paused while requests were on their way into it."""
        for exchange in tuple(self.in_flight.get(route.uid, ())):
            if exchange.upstream is not None and exchange.task is None:
                self._spawn(exchange, self._wait_until_running(exchange, route), "carry over")

    async def _wait_until_running(self, exchange: Exchange, route: Route) -> None:
        await self._held.hold(exchange, route)
        exchange.task = None


def track(
    exchange: Exchange, route: Route, traffic: SandboxTraffic, in_flight: set[Exchange]
) -> None:
    """Take in a request to a sandbox."""
    exchange.route = route
    exchange.traffic = traffic
    in_flight.add(exchange)
    traffic.requests += 1
    traffic.in_flight += 1
    traffic.last_active = exchange.started


def _is_stream(exchange: Exchange) -> bool:
    """Say whether an answer is under way that has no foreseeable end."""
    if exchange.is_tunnel:
        return True
    return exchange.response is not None and exchange.response.framing.length is None
