"""Requests in flight, by sandbox, and what happens to them when the sandbox changes.

When a sandbox ends, its in-flight requests are aborted. When it is paused, its streams and older
requests are aborted; a request that has just started is held until the sandbox runs again, if
traffic wakes it and the pause keeps its processes. An aborted request gets a 502, or a reset if its
response has begun. Connections to an earlier incarnation are never used again.
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
from paddock.kit.clock import Clock

Spawn = Callable[[Exchange, Coroutine[Any, Any, None], str], None]
"""Runs work for an exchange as a task that is cancelled when the exchange ends."""
_MOST_LATE_SECONDS = 5.0


class InflightRequests:
    """All requests in flight of one gateway."""

    def __init__(
        self,
        *,
        routes: RouteTable,
        sender: Sender,
        holds: HeldRequests,
        activity: Activity,
        spawn: Spawn,
        clock: Clock,
        limits: GatewayLimits,
        options: GatewayOptions,
    ) -> None:
        self._routes = routes
        self._sender = sender
        self._held = holds
        self._activity = activity
        self._spawn = spawn
        self._clock = clock
        self._limits = limits
        self._options = options
        self.in_flight: dict[str, set[Exchange]] = {}
        """By sandbox uid."""
        routes.on_change(self._route_changed)

    def begin(self, exchange: Exchange, route: Route) -> bool:
        """Register an authorized request; return False, after failing it, if the limit is
        reached."""
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
        """Unregister a request that ended; return its duration in seconds."""
        in_flight = self.in_flight.get(route.uid)
        if in_flight is not None:
            in_flight.discard(exchange)
        finished = self._clock.monotonic()
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
        """Apply to a request the route changes that happened while its connection was being
        made."""
        current = self._routes.get(route.id)
        if exchange.upstream is None or current is None or current.uid != route.uid:
            return
        if current.incarnation != route.incarnation:
            exchange.fail(502, error_responses.RESTARTED_UNANSWERED)
        elif current.state in (SandboxState.PAUSING, SandboxState.PAUSED):
            if self._outlives_pause(current):
                self._spawn(
                    exchange, self._wait_until_running(exchange, current), "hold over pause"
                )
            else:
                exchange.fail(502, error_responses.PAUSED_UNANSWERED)

    def _route_changed(self, old: Route | None, new: Route | None) -> None:
        """Cut or hold requests to a sandbox that ended, was replaced, restarted or paused."""
        if old is None:
            return
        if new is None or new.uid != old.uid:
            self._sender.drop(old.uid)
            for exchange in tuple(self.in_flight.get(old.uid, ())):
                if exchange.upstream is not None:
                    exchange.fail(502, error_responses.ENDED_UNANSWERED)
                else:
                    exchange.fail(502, error_responses.NOT_FOUND)
            self._activity.forget(old.uid)
            self.in_flight.pop(old.uid, None)
        elif new.incarnation != old.incarnation:
            self._sender.drop(old.uid)
            self._abort_sent(new, error_responses.RESTARTED_UNANSWERED, keep_recent=False)
        elif old.state is SandboxState.RUNNING and new.state in (
            SandboxState.PAUSING,
            SandboxState.PAUSED,
        ):
            self._sender.drop(old.uid)
            keep_recent = self._outlives_pause(new)
            self._abort_sent(new, error_responses.PAUSED_UNANSWERED, keep_recent=keep_recent)
            self._hold_over_pause(new)

    def _outlives_pause(self, route: Route) -> bool:
        """Whether a request that was sent just before a pause can be answered after it."""
        return self._options.wakes and route.wakes and not route.loses_processes

    def _abort_sent(self, route: Route, message: str, *, keep_recent: bool) -> None:
        """Abort requests sent to a sandbox; with `keep_recent`, except those that had just started
        when its pause was requested."""
        limit = self._clock.monotonic() - self._late_by(route) - self._limits.pause_grace_seconds
        for exchange in tuple(self.in_flight.get(route.uid, ())):
            is_recent = exchange.started >= limit and not _is_stream(exchange)
            if exchange.upstream is not None and not (keep_recent and is_recent):
                exchange.fail(502, message)

    def _late_by(self, route: Route) -> float:
        """Return how many seconds ago the pause was requested.

        A busy gateway learns of it late. The clocks of other machines may differ, hence the limit.
        """
        if route.pause_requested_at is None:
            return 0.0
        late = (self._clock.now() - route.pause_requested_at).total_seconds()
        return min(max(late, 0.0), _MOST_LATE_SECONDS)

    def _hold_over_pause(self, route: Route) -> None:
        """Hold requests whose sandbox was paused after they were sent, and wake it."""
        for exchange in tuple(self.in_flight.get(route.uid, ())):
            if exchange.upstream is not None and exchange.task is None:
                self._spawn(exchange, self._wait_until_running(exchange, route), "hold over pause")

    async def _wait_until_running(self, exchange: Exchange, route: Route) -> None:
        await self._held.hold(exchange, route)
        exchange.task = None


def track(
    exchange: Exchange, route: Route, traffic: SandboxTraffic, in_flight: set[Exchange]
) -> None:
    """Register a request to a sandbox and count it."""
    exchange.route = route
    exchange.traffic = traffic
    in_flight.add(exchange)
    traffic.requests += 1
    traffic.in_flight += 1
    traffic.last_active = exchange.started


def _is_stream(exchange: Exchange) -> bool:
    """Whether the exchange is a tunnel or a response of unknown length."""
    if exchange.is_tunnel:
        return True
    return exchange.response is not None and exchange.response.framing.length is None
