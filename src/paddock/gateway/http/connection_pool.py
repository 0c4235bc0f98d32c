"""Kept connections, by whose they are.

Keyed by a sandbox's incarnation: a connection of an earlier life is never used again.
"""

from collections.abc import Callable
from typing import NamedTuple

from paddock.gateway.http.upstream import Shelf


class PoolKey(NamedTuple):
    """Whose connections these are: one life of one sandbox, one port."""

    uid: str
    incarnation: int
    port: int


class UpstreamPool:
    """Shelves by sandbox, life and port."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._shelves: dict[str, dict[PoolKey, Shelf]] = {}

    def shelf(self, key: PoolKey) -> Shelf:
        """Give the shelf of a key."""
        of_sandbox = self._shelves.get(key.uid)
        if of_sandbox is None:
            of_sandbox = self._shelves[key.uid] = {}
        found = of_sandbox.get(key)
        if found is None:
            found = of_sandbox[key] = Shelf()
        return found

    def drop(self, uid: str) -> None:
        """Close every idle connection to a sandbox."""
        for shelf in self._shelves.pop(uid, {}).values():
            shelf.put_away()

    def drop_older(self, seconds: float) -> None:
        """Close connections that nobody has used for so long, and forget shelves without any."""
        now = self._now()
        for uid, of_sandbox in list(self._shelves.items()):
            for key, shelf in list(of_sandbox.items()):
                for connection in tuple(shelf.idle):
                    if connection.idle_since is None:
                        connection.idle_since = now
                    if now - connection.idle_since >= seconds:
                        shelf.idle.remove(connection)
                        connection.close()
                if not shelf.connections:
                    shelf.put_away()
                    del of_sandbox[key]
            if not of_sandbox:
                del self._shelves[uid]
