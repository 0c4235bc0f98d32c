"""Requests under way, by the sandbox that they are for, and what its life has in store for them.

Who ends takes its requests along. Who is paused breaks its streams off; a request that was just
on its way in is carried over the pause, where traffic wakes that sandbox. Nothing goes on over a
connection to an earlier life.
"""

from collections.abc import Callable, Coroutine
from hmac import compare_digest
from typing import Any

from paddock.cache.states import SandboxState
from paddock.gateway.activity import Activity, Traffic
from paddock.gateway.http import error_responses
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.http.sender import Sender
from paddock.gateway.limits import Behaviour, Limits
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.gateway.waking.held_requests import Holds

Spawn = Callable[[Exchange, Coroutine[Any, Any, None], str], None]
"""Lets work go on for an exchange, and end with it."""


class Lives:
    """Everything that sandboxes are being asked."""

    def __init__(
        self,
        *,
        routes: RouteTable,
        sender: Sender,
        holds: Holds,
        activity: Activity,
        spawn: Spawn,
        now: Callable[[], float],
        limits: Limits,
        behaviour: Behaviour,
    ) -> None:
        self._routes = routes
        self._sender = sender
        self._holds = holds
        self._activity = activity
        self._spawn = spawn
        self._now = now
        self._limits = limits
        self._behaviour = behaviour
        self.under_way: dict[str, set[Exchange]] = {}
        """By sandbox uid."""
        routes.on_change(self._route_changed)

    def begin(self, exchange: Exchange, route: Route) -> bool:
        """Take in a request that may go on; says whether there is room for it."""
        under_way = self.under_way.get(route.uid)
        if under_way is None:
            under_way = self.under_way[route.uid] = set()
        elif len(under_way) >= self._room(exchange, route):
            exchange.fail(429, "too many requests to this sandbox at once", retry_after_seconds=1)
            return False
        count(exchange, route, self._activity.traffic(route.uid, route.id), under_way)
        return True

    def _room(self, exchange: Exchange, route: Route) -> int:
        shown = exchange.head.access_token_hash
        if shown and compare_digest(shown, route.access_token_hash):
            return self._limits.requests_per_sandbox + self._limits.requests_reserved
        return self._limits.requests_per_sandbox

    def end(self, exchange: Exchange, route: Route, traffic: Traffic, status: int) -> float:
        """Take in that one is over; gives how long it took."""
        under_way = self.under_way.get(route.uid)
        if under_way is not None:
            under_way.discard(exchange)
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

    def catch_up(self, exchange: Exchange, route: Route) -> None:
        """Do for one request what was done for all others while its connection was being made."""
        current = self._routes.get(route.id)
        if exchange.upstream is None or current is None or current.uid != route.uid:
            return
        if current.incarnation != route.incarnation:
            exchange.abort()
        elif current.state in (SandboxState.PAUSING, SandboxState.PAUSED):
            if self._behaviour.wakes and current.wakes:
                self._spawn(exchange, self._wait_for_life(exchange, current), "carry over")
            else:
                exchange.abort()

    def _route_changed(self, old: Route | None, new: Route | None) -> None:
        """Cut off what belongs to a life that is over."""
        if old is None:
            return
        if new is None or new.uid != old.uid:
            self._sender.drop(old.uid)
            for exchange in tuple(self.under_way.get(old.uid, ())):
                if exchange.upstream is not None:
                    exchange.abort()
                else:
                    exchange.fail(502, error_responses.NOT_FOUND)
            self._activity.forget(old.uid)
            self.under_way.pop(old.uid, None)
        elif new.incarnation != old.incarnation:
            self._sender.drop(old.uid)
            self._cut(old.uid, keep_young=False)
        elif old.state is SandboxState.RUNNING and new.state in (
            SandboxState.PAUSING,
            SandboxState.PAUSED,
        ):
            self._sender.drop(old.uid)
            self._cut(old.uid, keep_young=self._behaviour.wakes and new.wakes)
            self._carry_over(new)

    def _cut(self, uid: str, *, keep_young: bool) -> None:
        """Break off what a sandbox was sent, save requests that came while it was being paused."""
        limit = self._now() - self._limits.pause_grace_seconds
        for exchange in tuple(self.under_way.get(uid, ())):
            is_young = exchange.started >= limit and not _is_stream(exchange)
            if exchange.upstream is not None and not (keep_young and is_young):
                exchange.abort()

    def _carry_over(self, route: Route) -> None:
        """Wake a sandbox that was paused while requests were on their way into it."""
        for exchange in tuple(self.under_way.get(route.uid, ())):
            if exchange.upstream is not None and exchange.task is None:
                self._spawn(exchange, self._wait_for_life(exchange, route), "carry over")

    async def _wait_for_life(self, exchange: Exchange, route: Route) -> None:
        await self._holds.until_running(exchange, route)
        exchange.task = None


def count(exchange: Exchange, route: Route, traffic: Traffic, under_way: set[Exchange]) -> None:
    """Take in a request to a sandbox."""
    exchange.route = route
    exchange.traffic = traffic
    under_way.add(exchange)
    traffic.requests += 1
    traffic.in_flight += 1
    traffic.last_active = exchange.started


def _is_stream(exchange: Exchange) -> bool:
    """Say whether an answer is under way that has no foreseeable end."""
    if exchange.is_tunnel:
        return True
    return exchange.response is not None and exchange.response.framing.length is None
