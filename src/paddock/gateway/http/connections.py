"""The client connections of one gateway process: limits, eviction, idle sweep, drain.

A connection without a request costs its client nothing, so it has no right to stay: whenever room
is needed, such connections are closed, the oldest first. Silent ones, which have not sent any
request, go before idle ones. A connection with a request in flight is never closed for another.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

from paddock.gateway.activity import Activity
from paddock.gateway.http import error_responses
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.limits import GatewayLimits
from paddock.kit.addresses import client_network
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

FULL = "too many connections"
FULL_FOR_ADDRESS = "too many connections from this address"
_SCANNED = 32
"""Connections looked at for an idle one. Those in use are moved back, so that later scans find
others."""
_SPARE_DESCRIPTORS = 256
"""Left for upstream connections when clients have taken all others."""
_EVICTED_AT_ONCE = 4
"""Closed per new connection while descriptors are short: each request needs one upstream too."""

Ordered = dict[ClientConnection, None]
"""Connections, the oldest first."""


class Connections:
    """All open client connections."""

    def __init__(
        self,
        activity: Activity,
        limits: GatewayLimits,
        now: Callable[[], float],
        *,
        is_behind_proxy: bool = False,
    ) -> None:
        """`is_behind_proxy`: connections come from trusted proxies, each for many clients."""
        self._activity = activity
        self._limits = limits
        self._now = now
        self._is_behind_proxy = is_behind_proxy
        self._silent: Ordered = {}
        self._served: Ordered = {}
        self._by_address: dict[str, Ordered] = {}
        spare = min(_SPARE_DESCRIPTORS, limits.descriptors // 8)
        self._last_descriptor = limits.descriptors - spare
        self._crowded_descriptor = self._last_descriptor - limits.descriptors // 8
        self._reported: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._served)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter((*self._silent, *self._served))

    def add(self, client: ClientConnection, descriptor: int) -> str | None:
        """Register a new connection, with room made for it; return why it is refused, or None.

        The kernel assigns the lowest free descriptor, so all below `descriptor` are in use.
        """
        limits = self._limits
        key = self._address_key(client)
        own = self._by_address.get(key, {})
        if 0 < limits.connections_per_address <= len(own) and not self._evict(own):
            return self._refuse(FULL_FOR_ADDRESS, "address")
        is_full = len(self) >= limits.connections
        if is_full or descriptor >= self._crowded_descriptor:
            has_room = self._evict_any(1 if is_full else _EVICTED_AT_ONCE)
            if not has_room and (
                len(self) >= limits.connections + limits.connections_reserved
                or descriptor >= self._last_descriptor
            ):
                return self._refuse(FULL, "full")
            client.is_reserved = is_full and not has_room
        self._silent[client] = None
        if key:
            self._by_address.setdefault(key, {})[client] = None
        self._activity.connections += 1
        return None

    def served(self, client: ClientConnection) -> None:
        """Record that a connection has sent its first request."""
        if client in self._silent:
            del self._silent[client]
            self._served[client] = None

    def remove(self, client: ClientConnection) -> None:
        """Unregister a closed connection."""
        if client not in self._silent and client not in self._served:
            return
        self._silent.pop(client, None)
        self._served.pop(client, None)
        self._activity.connections -= 1
        key = self._address_key(client)
        own = self._by_address.get(key)
        if own is not None:
            own.pop(client, None)
            if not own:
                del self._by_address[key]

    def count_refused(self, status: int) -> None:
        """Count bytes that are not a valid request, by the status of the response."""
        self._activity.count_response(status)

    # ---- room ----------------------------------------------------------------------------

    def _address_key(self, client: ClientConnection) -> str:
        """Return which connections count with this one; empty if it is not bounded."""
        if client.trusts_forwarded or self._is_behind_proxy:
            return ""
        return client_network(client.peer)

    def _evict_any(self, count: int) -> bool:
        """Close connections without a request; return whether any was closed."""
        closed = 0
        while closed < count and (self._evict(self._silent) or self._evict(self._served)):
            closed += 1
        return closed > 0

    def _evict(self, connections: Ordered) -> bool:
        """Close the oldest connection without a request; return False if none was found."""
        for client in tuple(_first(connections, _SCANNED)):
            if client.is_evictable:
                self.remove(client)
                client.close()
                self._count_closed("evicted")
                return True
            del connections[client]
            connections[client] = None
        return False

    def _refuse(self, message: str, reason: str) -> str:
        self.count_refused(503)
        self._count_closed(reason)
        return message

    def _count_closed(self, reason: str) -> None:
        self._activity.closed[reason] = self._activity.closed.get(reason, 0) + 1
        self._reported[reason] = self._reported.get(reason, 0) + 1

    # ---- time ----------------------------------------------------------------------------

    def sweep(self) -> None:
        """Close connections that are idle, or slow to send a head, for too long."""
        now = self._now()
        for client in self:
            since = client.head_since
            if since is not None:
                if now - since > self._limits.head_seconds:
                    self.count_refused(408)
                    client.write(
                        error_responses.error_response(
                            408, "the request's head did not arrive in time"
                        )
                    )
                    client.close()
            elif client.is_silent:
                if now - client.opened_at > self._limits.first_byte_seconds:
                    self._activity.closed["silent"] = self._activity.closed.get("silent", 0) + 1
                    client.abort() if client.is_closing else client.close()
            elif client.is_idle:
                if client.idle_since is None:
                    client.idle_since = now
                elif now - client.idle_since > self._limits.idle_seconds:
                    # A client that never reads never finishes closing: abort it.
                    client.abort() if client.is_closing else client.close()
        self._report()

    def _report(self) -> None:
        """Log what was closed or refused for lack of room since the last sweep."""
        if not self._reported:
            return
        closed, self._reported = self._reported, {}
        busiest = max(self._by_address.items(), key=lambda item: len(item[1]), default=("-", ()))
        log.warning(
            "connections were closed for lack of room",
            extra=fields(
                evicted=closed.get("evicted", 0),
                refused=closed.get("address", 0) + closed.get("full", 0),
                connections=len(self),
                most_from=busiest[0],
                count=len(busiest[1]),
            ),
        )

    async def drain(self, seconds: float) -> None:
        """Wait for requests in flight, up to this many seconds; then close every connection."""
        until = self._now() + seconds
        while len(self) and self._now() < until:
            for client in self:
                if client.is_idle:
                    client.close()
            await asyncio.sleep(0.02)
        self.close()

    def close(self) -> None:
        """Close every connection once its pending bytes are sent."""
        for client in self:
            client.close()


def _first(connections: Ordered, count: int) -> Iterator[ClientConnection]:
    for _, client in zip(range(count), connections, strict=False):
        yield client
