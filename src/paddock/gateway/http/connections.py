"""The client connections of one gateway process: limits, idle sweep, drain."""

import asyncio
from collections.abc import Callable, Iterator

from paddock.gateway.activity import Activity
from paddock.gateway.http import error_responses
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.limits import GatewayLimits


class Connections:
    """All open client connections."""

    def __init__(self, activity: Activity, limits: GatewayLimits, now: Callable[[], float]) -> None:
        self._activity = activity
        self._limits = limits
        self._now = now
        self._open: set[ClientConnection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(tuple(self._open))

    def add(self, client: ClientConnection) -> bool:
        """Register a new connection; return False if the limit is reached."""
        if len(self._open) >= self._limits.connections:
            self.count_refused(503)
            return False
        self._open.add(client)
        self._activity.connections += 1
        return True

    def remove(self, client: ClientConnection) -> None:
        """Unregister a closed connection."""
        if client in self._open:
            self._open.remove(client)
            self._activity.connections -= 1

    def count_refused(self, status: int) -> None:
        """Count bytes that are not a valid request, by the status of the response."""
        self._activity.count_response(status)

    def sweep(self) -> None:
        """Close connections that are idle, or slow to send a head, for too long."""
        now = self._now()
        for client in self:
            since = client.head_since
            if since is not None and now - since > self._limits.head_seconds:
                self.count_refused(408)
                client.write(
                    error_responses.error_response(408, "the request's head did not arrive in time")
                )
                client.close()
            elif client.is_idle:
                if client.idle_since is None:
                    client.idle_since = now
                elif now - client.idle_since > self._limits.idle_seconds:
                    # A client that never reads never finishes closing: abort it.
                    client.abort() if client.is_closing else client.close()

    async def drain(self, seconds: float) -> None:
        """Wait for requests in flight, up to this many seconds; then close every connection."""
        until = self._now() + seconds
        while self._open and self._now() < until:
            for client in self:
                if client.is_idle:
                    client.close()
            await asyncio.sleep(0.02)
        self.close()

    def close(self) -> None:
        """Close every connection once its pending bytes are sent."""
        for client in self:
            client.close()
