"""The gateway: dispatches each request.

In order: parse the address (`routing.addressing`), look up the route (`routing.routes`), check
access (`access`), wake the sandbox if needed (`waking.held_requests`), then forward the request
exactly once (`http.sender`). With an idle upstream connection all of this happens without
awaiting. Client connections are in `http.connections`; requests whose sandbox changes while they
are in flight in `waking.inflight`.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.gateway import access, browsers
from paddock.gateway.access import Allowed, Denied
from paddock.gateway.activity import Activity
from paddock.gateway.http import error_responses
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.http.connections import FULL, Connections
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.http.request_heads import RequestHead, RequestReader
from paddock.gateway.http.sender import Sender
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.gateway.routing import addressing, decision_cache
from paddock.gateway.routing.addressing import (
    ENVD_PORT,
    TASKS_PORT,
    Destination,
    Malformed,
    SignedFile,
)
from paddock.gateway.routing.decision_cache import CachedDecision
from paddock.gateway.routing.route_lookup import RouteLookup
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.gateway.signing import Signatures
from paddock.gateway.waking import inflight
from paddock.gateway.waking.held_requests import HeldRequests
from paddock.gateway.waking.inflight import InflightRequests
from paddock.gateway.waking.waker import Waker
from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError, UnavailableError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)
_INTERNAL_PATHS = ("/_paddock", "/metrics/", "/readyz/")
"""Paths of the API for gateways and operators, who do not go through a gateway."""
access_log = logging.getLogger("paddock.gateway.access")


class Gateway:
    """One gateway process."""

    def __init__(
        self,
        *,
        routes: RouteTable,
        waker: Waker,
        lookup: RouteLookup,
        sender: Sender,
        signatures: Signatures,
        activity: Activity,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        limits: GatewayLimits,
        options: GatewayOptions,
        secrets: tuple[str, ...] = (),
    ) -> None:
        """`secrets`: credentials of the APIs, which sandboxes must not receive."""
        self._routes = routes
        self._lookup = lookup
        self._sender = sender
        self._signatures = signatures
        self._activity = activity
        self._tasks = tasks
        self._limits = limits
        self._options = options
        self._held = HeldRequests(waker, activity, limits)
        self.clients = Connections(
            activity, limits, clock.monotonic, is_behind_proxy=options.trusts_forwarded
        )
        self.now = clock.monotonic
        self.read = RequestReader(secrets).read
        self._inflight = InflightRequests(
            routes=routes,
            sender=sender,
            holds=self._held,
            activity=activity,
            spawn=self._spawn,
            clock=clock,
            limits=limits,
            options=options,
        )

    def sweep(self) -> None:
        """Close connections that have been idle for too long, on both sides."""
        self.clients.sweep()
        self._sender.sweep()

    # ---- requests ------------------------------------------------------------------------

    def dispatch(self, exchange: Exchange, client: ClientConnection) -> None:
        """Forward a request, answer it, or hold it."""
        head = exchange.head
        if client.is_reserved and not self._is_authenticated(head):
            exchange.fail(503, FULL, retry_after_seconds=1)
            return
        decision = head.decisions.get(client.origin)
        if decision is not None and self._send_cached(exchange, head, decision):
            return
        destination = _address(head, head.method, head.target)
        if destination is None and head.access_token is not None:
            self._to_token_owner(exchange, head.access_token)
        elif destination is None:
            self._to_api(exchange)
        elif isinstance(destination, Malformed):
            exchange.fail(400, destination.message)
        elif not self._routes.is_ready:
            exchange.fail(503, "the gateway is not ready", retry_after_seconds=1)
        elif isinstance(destination, SignedFile):
            self._to_signed(exchange, destination)
        else:
            self._to_sandbox(exchange, destination)

    def _send_cached(self, exchange: Exchange, head: RequestHead, decision: CachedDecision) -> bool:
        """Forward a request by a cached decision; return False if it no longer applies."""
        route, in_flight = decision.route, decision.in_flight
        if (
            self._routes.get(route.id) is not route
            or not self._routes.is_ready
            or len(in_flight) >= self._limits.requests_per_sandbox
        ):
            return False
        if head.allowed_by is not decision:
            if not decision_cache.applies(head, decision.port):
                return False
            head.allowed_by = decision
        connection = decision.idle_connections.take()
        if connection is None:
            return False
        exchange.sandbox_id = route.id
        exchange.port = decision.port
        if head.upgrade is not None:
            _drop_upgrade_for_envd(exchange, decision.port)
        inflight.track(exchange, route, decision.traffic, in_flight)
        connection.serve(exchange, head.line + decision.lines)
        return True

    def _is_authenticated(self, head: RequestHead) -> bool:
        """Whether a request shows a credential: that of its sandbox, or any of the API, which
        checks it."""
        destination = _address(head, head.method, head.target)
        if isinstance(destination, SignedFile):
            return self._signatures.cached(destination) is not None
        if destination is None:
            if head.access_token is not None:
                return self._routes.get_by_token(head.access_token) is not None
            return head.has_credentials
        if isinstance(destination, Malformed):
            return False
        route = self._routes.get(destination.sandbox_id)
        return route is not None and access.shows_token(
            route, access_hash=head.access_token_hash, traffic_token=head.traffic_token
        )

    def _to_api(self, exchange: Exchange) -> None:
        path = access.canonical(exchange.head.target.partition("?")[0])
        if f"{path}/".startswith(_INTERNAL_PATHS):
            exchange.fail(404, "not found")
        elif (refusal := browsers.api_refusal(exchange.head)) is not None:
            exchange.fail(403, refusal)
        elif not self._sender.send_to_api(exchange):
            self._spawn(exchange, self._sender.connect_to_api(exchange), "api")

    def _to_token_owner(self, exchange: Exchange, token: str) -> None:
        """Forward a request addressed by access token only, as older SDKs send after connect."""
        route = self._routes.get_by_token(token)
        if route is None:
            exchange.fail(502, error_responses.NOT_FOUND)
        else:
            self._to_sandbox(exchange, _shared(route, exchange.head.target))

    def _to_signed(self, exchange: Exchange, wanted: SignedFile) -> None:
        route = self._signatures.cached(wanted)
        if route is not None:
            exchange.prefix = ""
            self._to_sandbox(exchange, _shared(route, exchange.head.target))
        else:
            self._spawn(exchange, self._search(exchange, wanted), "search signed URL")

    async def _search(self, exchange: Exchange, wanted: SignedFile) -> None:
        try:
            route = await self._signatures.search(wanted)
        except RateLimitedError as error:
            exchange.fail(503, error.message, retry_after_seconds=1)
            return
        exchange.task = None
        if exchange.is_over:
            return
        if route is None:
            exchange.fail(401, "unauthorized: invalid signature")
        else:
            exchange.prefix = ""
            self._to_sandbox(exchange, _shared(route, exchange.head.target))

    def _to_sandbox(self, exchange: Exchange, destination: Destination) -> None:
        exchange.sandbox_id, exchange.port = destination.sandbox_id, destination.port
        head, prefix = exchange.head, destination.prefix
        if prefix is not None and not self._sender.is_from_gateway(head, destination.sandbox_id):
            if (refusal := browsers.sandbox_refusal(head, destination)) is not None:
                exchange.fail(403, refusal)
                return
            if prefix or head.fetch_site or head.page_origin:
                exchange.prefix = prefix
        if head.upgrade is not None:
            _drop_upgrade_for_envd(exchange, destination.port)
        route = self._routes.get(destination.sandbox_id)
        if route is None:
            if self._lookup.is_known_absent(destination.sandbox_id):
                exchange.fail(502, error_responses.NOT_FOUND)
            else:
                self._spawn(exchange, self._find(exchange, destination), "look up route")
            return
        self._authorize(exchange, route, destination, is_confirmed=False)

    async def _find(self, exchange: Exchange, destination: Destination) -> None:
        """Look up the route in the control plane, then continue."""
        try:
            route = await self._lookup.find(destination.sandbox_id)
        except UnavailableError as error:
            exchange.fail(503, error.message, retry_after_seconds=1)
            return
        exchange.task = None
        if exchange.is_over:
            return
        if route is None:
            exchange.fail(502, error_responses.NOT_FOUND)
        else:
            self._authorize(exchange, route, destination, is_confirmed=True)

    def _authorize(
        self, exchange: Exchange, route: Route, destination: Destination, *, is_confirmed: bool
    ) -> None:
        """Check access, then the sandbox's state."""
        head = exchange.head
        if destination.port == ENVD_PORT and head.method == "OPTIONS" and _is_preflight(exchange):
            keep = head.is_keep_alive and exchange.is_request_done
            exchange.respond(204, error_responses.preflight(keep_alive=keep), keep_alive=keep)
            return
        verdict = access.check(
            route,
            port=destination.port,
            target=destination.target,
            access_hash=head.access_token_hash,
            traffic_token=head.traffic_token,
        )
        if isinstance(verdict, Denied):
            exchange.fail(verdict.status, verdict.message)
        elif route.state is SandboxState.RUNNING:
            if self._inflight.begin(exchange, route):
                self._send(exchange, route, destination, is_cacheable=verdict is Allowed.MAY_WAKE)
        elif self._may_wait(route, verdict, exchange, destination):
            if self._inflight.begin(exchange, route):
                self._hold(exchange, route, destination)
        elif is_confirmed or self._lookup.is_known_absent(destination.sandbox_id):
            exchange.fail(502, error_responses.NOT_FOUND)
        else:
            # It may have been resumed just now, with the update still on its way.
            self._spawn(exchange, self._find(exchange, destination), "find")

    def _send(
        self, exchange: Exchange, route: Route, destination: Destination, *, is_cacheable: bool
    ) -> None:
        if is_cacheable and route.remote is None:
            self._cache_decision(exchange, route, destination)
        if not self._sender.send(exchange, route, destination):
            self._spawn(exchange, self._connect(exchange, route, destination), "connect")

    async def _connect(self, exchange: Exchange, route: Route, destination: Destination) -> None:
        await self._sender.connect(exchange, route, destination)
        self._inflight.apply_missed_change(exchange, route)

    def _cache_decision(self, exchange: Exchange, route: Route, destination: Destination) -> None:
        head, client, traffic = exchange.head, exchange.client, exchange.traffic
        if not isinstance(client, ClientConnection) or traffic is None:
            return
        if not decision_cache.should_cache(head, client.origin):
            return
        # Only if the header lines alone name this sandbox: the request line varies.
        named = _address(head, "GET", "/")
        if not isinstance(named, Destination):
            return
        if (named.sandbox_id, named.port) == (destination.sandbox_id, destination.port):
            head.decisions[client.origin] = CachedDecision(
                route,
                destination.port,
                self._sender.lines(client, head, route, destination.port),
                self._sender.idle_connections(route, destination.port),
                traffic,
                self._inflight.in_flight[route.uid],
            )

    # ---- waking --------------------------------------------------------------------------

    def _may_wait(
        self, route: Route, verdict: Allowed, exchange: Exchange, destination: Destination
    ) -> bool:
        if route.state is SandboxState.CREATING:
            return True
        if not (self._options.wakes and route.wakes):
            return False
        if verdict is Allowed.MAY_WAKE:
            return True
        wanted = addressing.signed_file(exchange.head.method, destination.target)
        return wanted is not None and self._signatures.is_valid(route, wanted)

    def _hold(self, exchange: Exchange, route: Route, destination: Destination) -> None:
        if not self._held.has_room(route.uid):
            exchange.fail(
                503, "too many requests wait for this sandbox to wake", retry_after_seconds=1
            )
            return
        self._spawn(exchange, self._hold_then_send(exchange, route, destination), "wake")

    async def _hold_then_send(
        self, exchange: Exchange, route: Route, destination: Destination
    ) -> None:
        woken = await self._held.hold(exchange, route)
        if woken is not None:
            await self._connect(exchange, woken, destination)

    # ---- ends and retries of exchanges -------------------------------------------------------

    def exchange_ended(self, exchange: Exchange) -> None:
        """Count and log an exchange that ended, and cancel its task."""
        status = exchange.status or 499
        statuses = self._activity.statuses
        statuses[status] = statuses.get(status, 0) + 1
        if exchange.task is not None:
            task, exchange.task = exchange.task, None
            if isinstance(task, asyncio.Task) and task is not asyncio.current_task():
                task.cancel()
        route, traffic = exchange.route, exchange.traffic
        if route is None or traffic is None:
            return
        seconds = self._inflight.end(exchange, route, traffic, status)
        if self._options.logs_requests:
            self._log(exchange, route, seconds)

    @staticmethod
    def _log(exchange: Exchange, route: Route, seconds: float) -> None:
        access_log.info(
            "request",
            extra=fields(
                sandbox=route.id,
                port=exchange.port,
                method=exchange.head.method,
                # Never the query: it may contain signatures.
                path=exchange.head.target.partition("?")[0],
                status=exchange.status or 499,
                bytes_in=exchange.request_bytes,
                bytes_out=exchange.response_bytes,
                milliseconds=round(seconds * 1000, 2),
            ),
        )

    def retry(self, exchange: Exchange) -> None:
        """Send a request again over a new connection, after a reused one closed."""
        self._spawn(exchange, self._reconnect(exchange), "reconnect")

    async def _reconnect(self, exchange: Exchange) -> None:
        await self._sender.reconnect(exchange)
        if exchange.route is not None:
            self._inflight.apply_missed_change(exchange, exchange.route)

    def _spawn(self, exchange: Exchange, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.create_task(self._guarded(exchange, work), name=name)
        # A task cancelled before its first step never awaits the coroutine.
        task.add_done_callback(lambda _: work.close())
        exchange.task = task

    async def _guarded(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("request failed", extra=fields(sandbox=exchange.sandbox_id))
            exchange.fail(500, "internal error")


def _drop_upgrade_for_envd(exchange: Exchange, port: int) -> None:
    """Drop the Upgrade header for envd, which speaks HTTP/1.1 only."""
    if port in (ENVD_PORT, TASKS_PORT):
        head = exchange.head
        exchange.head = structs.replace(head, upgrade=None, is_kept=head.is_keep_alive)


def _shared(route: Route, target: str) -> Destination:
    """Return where a request goes whose URL does not name the sandbox."""
    return Destination(route.id, ENVD_PORT, target, prefix="")


def _address(head: RequestHead, method: str, target: str) -> addressing.Address:
    return addressing.parse(
        method=method,
        target=target,
        host=head.host,
        sandbox_header=head.sandbox,
        port_header=head.port,
        ingress_header=head.ingress,
    )


def _is_preflight(exchange: Exchange) -> bool:
    return any(
        line[:30].lower() == b"access-control-request-method:" for line in exchange.head.lines
    )
