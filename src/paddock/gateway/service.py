"""The gateway: what becomes of each request.

In order: whose it is (`addressing`), whether there is such a sandbox (`routes`), whether the
caller may (`access`), whether it must be woken first (`holding`); then it is sent on, exactly
once (`sending`). Where an idle upstream connection is at hand, all of that happens without a
pause.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from msgspec import structs

from paddock.cache.states import State
from paddock.gateway import access, addressing, replies, shortcuts
from paddock.gateway.access import Denied, Pass
from paddock.gateway.activity import Activity, Traffic
from paddock.gateway.addressing import (
    ENVD_PORT,
    TASKS_PORT,
    Destination,
    Malformed,
    SignedFile,
)
from paddock.gateway.client import ClientConnection
from paddock.gateway.exchange import Exchange
from paddock.gateway.finding import Finder
from paddock.gateway.heads import RequestHead, RequestReader
from paddock.gateway.holding import Holds
from paddock.gateway.limits import Behaviour, Limits
from paddock.gateway.routes import Route, RouteTable
from paddock.gateway.sending import Sender
from paddock.gateway.shortcuts import Shortcut
from paddock.gateway.signing import Signatures
from paddock.gateway.waker import Waker
from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError, UnavailableError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)
_OURS = ("/_paddock", "/metrics/", "/readyz/")
"""Paths of the API that are for gateways and operators, who ask it without one between."""
access_log = logging.getLogger("paddock.gateway.access")


class Gateway:
    """One gateway process."""

    def __init__(
        self,
        *,
        routes: RouteTable,
        waker: Waker,
        finder: Finder,
        sender: Sender,
        signatures: Signatures,
        activity: Activity,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        limits: Limits,
        behaviour: Behaviour,
    ) -> None:
        self._routes = routes
        self._waker = waker
        self._finder = finder
        self._sender = sender
        self._signatures = signatures
        self._tasks = tasks
        self._limits = limits
        self._behaviour = behaviour
        self._holds = Holds(waker, activity, limits)
        self._clients: set[ClientConnection] = set()
        self._exchanges: dict[str, set[Exchange]] = {}
        """Under way, by sandbox uid."""
        self.activity = activity
        self.now = clock.monotonic
        self.read = RequestReader().read
        routes.on_change(self._route_changed)

    # ---- connections ---------------------------------------------------------------------

    def connected(self, client: ClientConnection) -> bool:
        """Take in a new connection; says whether there is room for it."""
        if len(self._clients) >= self._limits.connections:
            self.refused(503)
            return False
        self._clients.add(client)
        self.activity.connections += 1
        return True

    def disconnected(self, client: ClientConnection) -> None:
        """Take in that a connection is gone."""
        if client in self._clients:
            self._clients.remove(client)
            self.activity.connections -= 1

    def refused(self, status: int) -> None:
        """Take in that something was sent that is no request."""
        self.activity.answered(status)

    def sweep(self) -> None:
        """Close what has been idle, or slow with its head, for too long."""
        now = self.now()
        for client in tuple(self._clients):
            since = client.head_since
            if since is not None and now - since > self._limits.head_seconds:
                self.refused(408)
                client.write(replies.reply(408, "the request's head did not arrive in time"))
                client.close()
            elif client.is_idle:
                if client.idle_since is None:
                    client.idle_since = now
                elif now - client.idle_since > self._limits.idle_seconds:
                    # (One that never reads what it was sent is never done with closing.)
                    client.abort() if client.is_closing else client.close()
        self._sender.sweep()

    async def drain(self, seconds: float) -> None:
        """Let requests under way be answered, for a while; then close every connection."""
        until = self.now() + seconds
        while self._clients and self.now() < until:
            for client in tuple(self._clients):
                if client.is_idle:
                    client.close()
            await asyncio.sleep(0.02)
        self.close_all()

    def close_all(self) -> None:
        """Close every connection, once what it carries is sent."""
        for client in tuple(self._clients):
            client.close()

    # ---- requests ------------------------------------------------------------------------

    def dispatch(self, exchange: Exchange, client: ClientConnection) -> None:
        """Send a request on, answer it, or hold it."""
        head = exchange.head
        shortcut = head.shortcuts.get(client.origin)
        if shortcut is not None and self._send_alike(exchange, head, shortcut):
            return
        where = _address(head, head.method, head.target)
        if where is None and head.access_token is not None:
            self._to_holder(exchange, head.access_token)
        elif where is None:
            self._to_api(exchange)
        elif isinstance(where, Malformed):
            exchange.fail(400, where.message)
        elif not self._routes.is_ready:
            exchange.fail(503, "the gateway is not ready", retry_after_seconds=1)
        elif isinstance(where, SignedFile):
            self._to_signed(exchange, where)
        else:
            self._to_sandbox(exchange, where)

    def _send_alike(self, exchange: Exchange, head: RequestHead, shortcut: Shortcut) -> bool:
        """Send on what was decided before; says whether that still holds, and could be done."""
        route, under_way = shortcut.route, shortcut.under_way
        if (
            self._routes.get(route.id) is not route
            or not self._routes.is_ready
            or len(under_way) >= self._limits.requests_per_sandbox
        ):
            return False
        if head.cleared is not shortcut:
            if not shortcuts.is_clear(head, shortcut.port):
                return False
            head.cleared = shortcut
        connection = shortcut.shelf.take()
        if connection is None:
            return False
        exchange.sandbox_id = route.id
        exchange.port = shortcut.port
        self._count(exchange, route, shortcut.traffic, under_way)
        connection.serve(exchange, head.line + shortcut.lines)
        return True

    def _to_api(self, exchange: Exchange) -> None:
        path = access.canonical(exchange.head.target.partition("?")[0])
        if f"{path}/".startswith(_OURS):
            exchange.fail(404, "not found")
        elif not self._sender.send_to_api(exchange):
            self._spawn(exchange, self._sender.connect_to_api(exchange), "api")

    def _to_holder(self, exchange: Exchange, token: str) -> None:
        """Send on what only a sandbox's own token addresses: older SDKs, after they connect."""
        route = self._routes.of_token(token)
        if route is None:
            exchange.fail(502, replies.NOT_FOUND)
        else:
            self._to_sandbox(exchange, Destination(route.id, ENVD_PORT, exchange.head.target))

    def _to_signed(self, exchange: Exchange, wanted: SignedFile) -> None:
        route = self._signatures.known(wanted)
        if route is not None:
            self._to_sandbox(exchange, Destination(route.id, ENVD_PORT, exchange.head.target))
        else:
            self._spawn(exchange, self._search(exchange, wanted), "signed URL")

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
            self._to_sandbox(exchange, Destination(route.id, ENVD_PORT, exchange.head.target))

    def _to_sandbox(self, exchange: Exchange, where: Destination) -> None:
        exchange.sandbox_id, exchange.port = where.sandbox_id, where.port
        if where.port in (ENVD_PORT, TASKS_PORT) and exchange.head.upgrade is not None:
            # envd speaks one protocol; whoever offers another is answered in this one.
            head = exchange.head
            exchange.head = structs.replace(head, upgrade=None, is_kept=head.is_keep_alive)
        route = self._routes.get(where.sandbox_id)
        if route is None:
            if self._finder.is_known_no(where.sandbox_id):
                exchange.fail(502, replies.NOT_FOUND)
            else:
                self._spawn(exchange, self._find(exchange, where), "find")
            return
        self._knock(exchange, route, where, is_confirmed=False)

    async def _find(self, exchange: Exchange, where: Destination) -> None:
        """Ask the control plane, then go on with what it says."""
        try:
            route = await self._finder.find(where.sandbox_id)
        except UnavailableError as error:
            exchange.fail(503, error.message, retry_after_seconds=1)
            return
        exchange.task = None
        if exchange.is_over:
            return
        if route is None:
            exchange.fail(502, replies.NOT_FOUND)
        else:
            self._knock(exchange, route, where, is_confirmed=True)

    def _knock(
        self, exchange: Exchange, route: Route, where: Destination, *, is_confirmed: bool
    ) -> None:
        """Check the caller's right; then the sandbox's state."""
        head = exchange.head
        if where.port == ENVD_PORT and head.method == "OPTIONS" and _is_preflight(exchange):
            keep = head.is_keep_alive and exchange.is_request_done
            exchange.answer(204, replies.preflight(keep_alive=keep), keep_alive=keep)
            return
        verdict = access.check(
            route,
            port=where.port,
            target=where.target,
            access_hash=head.access_token_hash,
            traffic_token=head.traffic_token,
        )
        if isinstance(verdict, Denied):
            exchange.fail(verdict.status, verdict.message)
        elif route.state is State.RUNNING:
            if self._begin(exchange, route):
                self._send(exchange, route, where, is_right_shown=verdict is Pass.AND_WAKE)
        elif self._may_wait(route, verdict, exchange, where):
            if self._begin(exchange, route):
                self._hold(exchange, route, where)
        elif is_confirmed or self._finder.is_known_no(where.sandbox_id):
            exchange.fail(502, replies.NOT_FOUND)
        else:
            # Perhaps it was resumed a moment ago and the news is under way.
            self._spawn(exchange, self._find(exchange, where), "find")

    def _begin(self, exchange: Exchange, route: Route) -> bool:
        under_way = self._exchanges.get(route.uid)
        if under_way is None:
            under_way = self._exchanges[route.uid] = set()
        elif len(under_way) >= self._limits.requests_per_sandbox:
            exchange.fail(429, "too many requests to this sandbox at once", retry_after_seconds=1)
            return False
        traffic = self.activity.traffic(route.uid, route.id)
        self._count(exchange, route, traffic, under_way)
        return True

    @staticmethod
    def _count(
        exchange: Exchange, route: Route, traffic: Traffic, under_way: set[Exchange]
    ) -> None:
        exchange.route = route
        exchange.traffic = traffic
        under_way.add(exchange)
        traffic.requests += 1
        traffic.in_flight += 1
        traffic.last_active = exchange.started

    def _send(
        self, exchange: Exchange, route: Route, where: Destination, *, is_right_shown: bool
    ) -> None:
        if is_right_shown and route.remote is None:
            self._keep_shortcut(exchange, route, where)
        if not self._sender.send(exchange, route, where):
            self._spawn(exchange, self._connect(exchange, route, where), "connect")

    async def _connect(self, exchange: Exchange, route: Route, where: Destination) -> None:
        await self._sender.connect(exchange, route, where)
        self._catch_up(exchange, route)

    def _keep_shortcut(self, exchange: Exchange, route: Route, where: Destination) -> None:
        head, client, traffic = exchange.head, exchange.client, exchange.traffic
        if not isinstance(client, ClientConnection) or traffic is None:
            return
        if not shortcuts.is_wanted(head, client.origin):
            return
        # Whether the lines alone name this sandbox: the first line differs from case to case.
        if _address(head, "GET", "/") == Destination(where.sandbox_id, where.port, "/"):
            head.shortcuts[client.origin] = Shortcut(
                route,
                where.port,
                self._sender.lines(client, head, route, where.port),
                self._sender.shelf(route, where.port),
                traffic,
                self._exchanges[route.uid],
            )

    # ---- waking --------------------------------------------------------------------------

    def _may_wait(
        self, route: Route, verdict: Pass, exchange: Exchange, where: Destination
    ) -> bool:
        if route.state is State.CREATING:
            return True
        if not (self._behaviour.wakes and route.wakes):
            return False
        if verdict is Pass.AND_WAKE:
            return True
        wanted = addressing.signed_file(exchange.head.method, where.target)
        return wanted is not None and self._signatures.holds(route, wanted)

    def _hold(self, exchange: Exchange, route: Route, where: Destination) -> None:
        if not self._holds.has_room(route.uid):
            exchange.fail(
                503, "too many requests wait for this sandbox to wake", retry_after_seconds=1
            )
            return
        self._spawn(exchange, self._wake(exchange, route, where), "wake")

    async def _wake(self, exchange: Exchange, route: Route, where: Destination) -> None:
        woken = await self._holds.until_running(exchange, route)
        if woken is not None:
            await self._connect(exchange, woken, where)

    # ---- what becomes of exchanges -------------------------------------------------------

    def ended(self, exchange: Exchange) -> None:
        """Take in that an exchange is over."""
        status = exchange.status or 499
        statuses = self.activity.statuses
        statuses[status] = statuses.get(status, 0) + 1
        if exchange.task is not None:
            task, exchange.task = exchange.task, None
            if isinstance(task, asyncio.Task) and task is not asyncio.current_task():
                task.cancel()
        route, traffic = exchange.route, exchange.traffic
        if route is None or traffic is None:
            return
        under_way = self._exchanges.get(route.uid)
        if under_way is not None:
            under_way.discard(exchange)
        finished = self.now()
        traffic.in_flight -= 1
        traffic.last_active = finished
        traffic.seconds += finished - exchange.started
        traffic.request_bytes += exchange.request_bytes
        traffic.response_bytes += exchange.response_bytes
        if status >= 500:
            traffic.errors += 1
        if self._behaviour.logs_requests:
            self._log(exchange, route, finished - exchange.started)

    @staticmethod
    def _log(exchange: Exchange, route: Route, seconds: float) -> None:
        access_log.info(
            "request",
            extra=fields(
                sandbox=route.id,
                port=exchange.port,
                method=exchange.head.method,
                # Never the query: signatures are in there.
                path=exchange.head.target.partition("?")[0],
                status=exchange.status or 499,
                bytes_in=exchange.request_bytes,
                bytes_out=exchange.response_bytes,
                milliseconds=round(seconds * 1000, 2),
            ),
        )

    def again(self, exchange: Exchange) -> None:
        """Send a request over a new connection: the kept one had just ended."""
        self._spawn(exchange, self._connect_again(exchange), "connect again")

    async def _connect_again(self, exchange: Exchange) -> None:
        await self._sender.connect_again(exchange)
        if exchange.route is not None:
            self._catch_up(exchange, exchange.route)

    def _spawn(self, exchange: Exchange, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.create_task(self._guarded(exchange, work), name=name)
        # One that is cancelled before its first step has not begun with the work.
        task.add_done_callback(lambda _: work.close())
        exchange.task = task

    async def _guarded(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("request failed", extra=fields(sandbox=exchange.sandbox_id))
            exchange.fail(500, "internal error")

    def _route_changed(self, old: Route | None, new: Route | None) -> None:
        """Cut off what belongs to a life that is over."""
        if old is None:
            return
        if new is None or new.uid != old.uid:
            self._sender.drop(old.uid)
            for exchange in tuple(self._exchanges.get(old.uid, ())):
                if exchange.upstream is not None:
                    exchange.abort()
                else:
                    exchange.fail(502, replies.NOT_FOUND)
            self.activity.forget(old.uid)
            self._exchanges.pop(old.uid, None)
        elif new.incarnation != old.incarnation:
            self._sender.drop(old.uid)
            self._cut(old.uid, keep_young=False)
        elif old.state is State.RUNNING and new.state in (State.PAUSING, State.PAUSED):
            self._sender.drop(old.uid)
            self._cut(old.uid, keep_young=self._behaviour.wakes and new.wakes)
            self._carry_over(new)

    def _cut(self, uid: str, *, keep_young: bool) -> None:
        """Break off what a sandbox was sent, save requests that came while it was being paused."""
        limit = self.now() - self._limits.pause_grace_seconds
        for exchange in tuple(self._exchanges.get(uid, ())):
            is_young = exchange.started >= limit and not _is_stream(exchange)
            if exchange.upstream is not None and not (keep_young and is_young):
                exchange.abort()

    def _carry_over(self, route: Route) -> None:
        """Wake a sandbox that was paused while requests were on their way into it."""
        for exchange in tuple(self._exchanges.get(route.uid, ())):
            if exchange.upstream is not None and exchange.task is None:
                self._spawn(exchange, self._wait_for_life(exchange, route), "carry over")

    def _catch_up(self, exchange: Exchange, route: Route) -> None:
        """Do for one request what was done for all others while its connection was being made."""
        current = self._routes.get(route.id)
        if exchange.upstream is None or current is None or current.uid != route.uid:
            return
        if current.incarnation != route.incarnation:
            exchange.abort()
        elif current.state in (State.PAUSING, State.PAUSED):
            if self._behaviour.wakes and current.wakes:
                self._spawn(exchange, self._wait_for_life(exchange, current), "carry over")
            else:
                exchange.abort()

    async def _wait_for_life(self, exchange: Exchange, route: Route) -> None:
        await self._holds.until_running(exchange, route)
        exchange.task = None


def _address(head: RequestHead, method: str, target: str) -> addressing.Address:
    return addressing.parse(
        method=method,
        target=target,
        host=head.host,
        sandbox_header=head.sandbox,
        port_header=head.port,
        ingress_header=head.ingress,
    )


def _is_stream(exchange: Exchange) -> bool:
    """Say whether an answer is under way that has no foreseeable end."""
    if exchange.is_tunnel:
        return True
    return exchange.response is not None and exchange.response.framing.length is None


def _is_preflight(exchange: Exchange) -> bool:
    return any(
        line[:30].lower() == b"access-control-request-method:" for line in exchange.head.lines
    )
