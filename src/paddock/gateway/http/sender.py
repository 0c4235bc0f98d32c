"""Forward requests upstream: at once over an idle connection, or over a new one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from paddock.gateway.http import error_responses
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.http.connection_pool import ConnectionPool, PoolKey
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.http.request_heads import RequestHead
from paddock.gateway.http.request_rewrite import client_address, write_lines, write_request
from paddock.gateway.http.upstream import IdleConnections, UpstreamConnection
from paddock.gateway.limits import GatewayLimits, GatewayOptions
from paddock.gateway.routing.addressing import ENVD_PORT, TASKS_PORT, Destination
from paddock.gateway.routing.hops import GatewayHops
from paddock.gateway.routing.recent_reboots import RecentReboots
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, UnavailableError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

_API = PoolKey("api", 0, 0)
_BOOT_POLL_SECONDS = 0.1
_BOOT_RETRY_SECONDS = 5
_LATE_SECONDS = 0.25
"""If a timeout fires this late, this process was stalled, and the other side is not to blame."""


class Dialer(Protocol):
    """Connects to sandboxes and to the API."""

    async def dial(
        self, route: Route, port: int, protocol: UpstreamConnection
    ) -> UpstreamConnection:
        """Connect to a port of a sandbox; raises `ConnectionError` if nothing listens."""
        ...

    async def dial_api(self, protocol: UpstreamConnection) -> UpstreamConnection:
        """Connect to the API."""
        ...


class Sender:
    """Forwards requests over the upstream connections of one gateway."""

    def __init__(
        self,
        dialer: Dialer,
        routes: RouteTable,
        clock: Clock,
        *,
        limits: GatewayLimits,
        options: GatewayOptions,
        hops: GatewayHops | None = None,
    ) -> None:
        self._hops = hops
        self._dialer = dialer
        self._routes = routes
        self._limits = limits
        self._trusts = options.trusts_forwarded
        self._pool = ConnectionPool(clock.monotonic)
        self._reboots = RecentReboots(routes, clock.monotonic, seconds=limits.boot_seconds)

    def sweep(self) -> None:
        """Close connections that have been idle for too long."""
        self._pool.close_older(self._limits.upstream_idle_seconds)

    def drop(self, uid: str) -> None:
        """Close every idle connection to a sandbox."""
        self._pool.drop(uid)

    # ---- to sandboxes --------------------------------------------------------------------

    def idle_connections(self, route: Route, port: int) -> IdleConnections:
        """Return the idle connections to a port of the sandbox's current incarnation."""
        return self._pool.idle_connections(PoolKey(route.uid, route.incarnation, port))

    def send(self, exchange: Exchange, route: Route, destination: Destination) -> bool:
        """Send over an idle connection; return False if there is none."""
        connection = self.idle_connections(route, destination.port).take()
        if connection is None:
            return False
        connection.serve(exchange, self._sandbox_head(exchange, route, destination))
        return True

    def lines(self, client: ClientConnection, head: RequestHead, route: Route, port: int) -> bytes:
        """Return everything after the request line of the head that a local sandbox receives."""
        return write_lines(
            head,
            host=_host(head, route, port),
            client=client.peer,
            scheme=client.scheme,
            trusted=self._trusts or client.trusts_forwarded,
        )

    def is_from_gateway(self, head: RequestHead, sandbox_id: str) -> bool:
        """Whether another gateway has sent a request to this sandbox."""
        return self._hops is not None and self._hops.is_signed(sandbox_id, head.gateway_signature)

    async def connect(self, exchange: Exchange, route: Route, destination: Destination) -> None:
        """Connect to the sandbox and send the request, or fail the exchange."""
        head = self._sandbox_head(exchange, route, destination)
        await self._connect(exchange, route, destination.port, head)

    async def reconnect(self, exchange: Exchange) -> None:
        """Send a request again over a new connection, after a reused one closed."""
        if exchange.route is None or exchange.port is None:
            await self._connect_to_api(exchange, exchange.sent)
        else:
            await self._connect(exchange, exchange.route, exchange.port, exchange.sent)

    async def _connect(self, exchange: Exchange, route: Route, port: int, head: bytes) -> None:
        try:
            connection = await self._dial_until_open(route, port)
        except ConnectionRefusedError:
            retry = _BOOT_RETRY_SECONDS if self._reboots.has_booted(route) else None
            exchange.fail(502, error_responses.PORT_CLOSED, port=port, retry_after_seconds=retry)
        except TimeoutError:
            exchange.fail(504, "the sandbox did not accept the connection in time", port=port)
        except (OSError, UnavailableError, NotFoundError) as error:
            log.info("dial failed", extra=fields(sandbox=route.id, error=repr(error)))
            if self._routes.get(route.id) is None:
                exchange.fail(502, error_responses.NOT_FOUND)
            else:
                exchange.fail(502, error_responses.PORT_CLOSED, port=port)
        else:
            _serve(connection, exchange, head)

    async def _dial_until_open(self, route: Route, port: int) -> UpstreamConnection:
        """Connect; after a reboot, wait until the port is open."""
        while True:
            try:
                return await self._dial_in_time(
                    lambda: self._dial(
                        route, port, UpstreamConnection(self.idle_connections(route, port))
                    )
                )
            except ConnectionRefusedError:
                if not self._reboots.may_open_port(route):
                    raise
            await asyncio.sleep(_BOOT_POLL_SECONDS)

    async def _dial_in_time(
        self, dial: Callable[[], Awaitable[UpstreamConnection]]
    ) -> UpstreamConnection:
        """Connect within the timeout; retry once if this process itself was stalled."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.connect_seconds
        try:
            async with asyncio.timeout_at(until):
                return await dial()
        except TimeoutError:
            if loop.time() < until + _LATE_SECONDS:
                raise
        async with asyncio.timeout(self._limits.connect_seconds):
            return await dial()

    async def _dial(
        self, route: Route, port: int, protocol: UpstreamConnection
    ) -> UpstreamConnection:
        if route.remote is None:
            return await self._dialer.dial(route, port, protocol)
        host, _, number = route.remote.rpartition(":")
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: protocol, host.strip("[]"), int(number))
        return protocol

    def _sandbox_head(self, exchange: Exchange, route: Route, destination: Destination) -> bytes:
        if route.remote is not None:
            # Address by path: it works with any host name of the other gateway.
            target = f"/kruise/{route.id}/{destination.port}{destination.target}"
            token = exchange.head.traffic_token if route.traffic_token_hash else None
            extra = f"E2b-Traffic-Access-Token: {token}\r\n" if token is not None else ""
            if self._hops is not None:
                extra += f"Paddock-Gateway: {self._hops.sign(route.id)}\r\n"
            return self._head(exchange, target, route.remote, extra=extra.encode("latin-1"))
        return self._head(
            exchange, destination.target, _host(exchange.head, route, destination.port)
        )

    def _head(self, exchange: Exchange, target: str, host: str, *, extra: bytes = b"") -> bytes:
        client = _connection(exchange)
        return write_request(
            exchange.head,
            target=target,
            host=host,
            client=client.peer,
            scheme=client.scheme,
            trusted=self._trusts or client.trusts_forwarded,
            extra=extra,
        )

    # ---- to the API ----------------------------------------------------------------------

    def send_to_api(self, exchange: Exchange) -> bool:
        """Send over an idle connection; return False if there is none."""
        connection = self._pool.idle_connections(_API).take()
        if connection is None:
            return False
        connection.serve(exchange, self._api_head(exchange))
        return True

    async def connect_to_api(self, exchange: Exchange) -> None:
        """Connect to the API and send the request, or fail the exchange."""
        await self._connect_to_api(exchange, self._api_head(exchange))

    def _api_head(self, exchange: Exchange) -> bytes:
        head, client = exchange.head, _connection(exchange)
        trusted = self._trusts or client.trusts_forwarded
        address = client_address(head, client=client.peer, trusted=trusted)
        extra = head.api_lines + f"X-Real-Ip: {address}\r\n".encode("latin-1")
        return self._head(exchange, head.target, head.host or "localhost", extra=extra)

    async def _connect_to_api(self, exchange: Exchange, head: bytes) -> None:
        try:
            connection = await self._dial_in_time(
                lambda: self._dialer.dial_api(UpstreamConnection(self._pool.idle_connections(_API)))
            )
        except (OSError, TimeoutError):
            exchange.fail(503, "the control plane does not answer", retry_after_seconds=1)
            return
        _serve(connection, exchange, head)


def _connection(exchange: Exchange) -> ClientConnection:
    if not isinstance(exchange.client, ClientConnection):
        raise TypeError("the client side is not a ClientConnection")
    return exchange.client


def _host(head: RequestHead, route: Route, port: int) -> str:
    """Return the Host header that the sandbox receives."""
    if route.mask_host and port not in (ENVD_PORT, TASKS_PORT):
        return route.mask_host.replace("${PORT}", str(port))
    return head.host or f"localhost:{port}"


def _serve(connection: UpstreamConnection, exchange: Exchange, head: bytes) -> None:
    exchange.task = None
    if exchange.is_over:
        connection.abort()
    elif connection.is_open:
        connection.serve(exchange, head)
    else:
        # Accepted and closed at once: `connection_lost` has already run.
        exchange.is_reusing = False
        exchange.upstream_lost()
