"""The pool of idle upstream connections.

Keyed by a sandbox's incarnation: a connection to an earlier incarnation is never reused.
"""

from collections.abc import Callable
from typing import NamedTuple

from paddock.gateway.http.upstream import IdleConnections


class PoolKey(NamedTuple):
    """One incarnation of one sandbox, and one port."""

    uid: str
    incarnation: int
    port: int


class ConnectionPool:
    """Upstream connections by sandbox, incarnation and port."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_uid: dict[str, dict[PoolKey, IdleConnections]] = {}

    def idle_connections(self, key: PoolKey) -> IdleConnections:
        """Return the idle connections of a key."""
        of_sandbox = self._by_uid.get(key.uid)
        if of_sandbox is None:
            of_sandbox = self._by_uid[key.uid] = {}
        found = of_sandbox.get(key)
        if found is None:
            found = of_sandbox[key] = IdleConnections()
        return found

    def drop(self, uid: str) -> None:
        """Close every idle connection to a sandbox."""
        for idle_connections in self._by_uid.pop(uid, {}).values():
            idle_connections.close()

    def close_older(self, seconds: float) -> None:
        """Close connections that have been idle for so long, and drop keys without any."""
        now = self._now()
        for uid, of_sandbox in list(self._by_uid.items()):
            for key, idle_connections in list(of_sandbox.items()):
                for connection in tuple(idle_connections.idle):
                    if connection.idle_since is None:
                        connection.idle_since = now
                    if now - connection.idle_since >= seconds:
                        idle_connections.idle.remove(connection)
                        connection.close()
                if not idle_connections.connections:
                    idle_connections.close()
                    del of_sandbox[key]
            if not of_sandbox:
                del self._by_uid[uid]
