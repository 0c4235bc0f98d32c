"""Decisions that hold for every request with the same header lines, made once.

Requests of one client differ in their first line and hardly in the others. Where those others
named the sandbox and showed the right to it, and everything is as it was (the very same route,
the same kind of client), the next request needs only what depends on its first line: that this
names no other sandbox and no path that is for nobody outside. Whatever is not plain goes the
long way, `service`'s.
"""

from msgspec import Struct

from paddock.gateway.access import INTERNAL_PATHS, canonical
from paddock.gateway.activity import SandboxTraffic
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.http.request_heads import RequestHead
from paddock.gateway.http.upstream import IdleConnections
from paddock.gateway.routing.addressing import ENVD_PORT
from paddock.gateway.routing.routes import Route

_ORIGINS = 8
"""Kept for one set of lines: more clients than these share no tokens."""


class CachedDecision(Struct, frozen=True, eq=False):
    """Where requests with certain lines go, from clients of one origin."""

    route: Route
    """It holds as long as this is the route, the very object."""
    port: int
    lines: bytes
    """Everything after the first line, as the sandbox sees it."""
    idle_connections: IdleConnections
    traffic: SandboxTraffic
    in_flight: set[Exchange]
    """Everything that the sandbox is being asked."""


def applies(head: RequestHead, port: int) -> bool:
    """Say whether a head goes where its lines say, as far as its first line has a say."""
    target, method = head.target, head.method
    if not head.line or target.startswith("/kruise/") or method == "OPTIONS":
        return False
    # (Older SDKs' call of the API that names a sandbox as requests to sandboxes do.)
    if method == "POST" and target.endswith("/connect"):
        return False
    return port != ENVD_PORT or canonical(target.partition("?")[0]) not in INTERNAL_PATHS


def should_cache(head: RequestHead, origin: str) -> bool:
    """Say whether to keep a shortcut: from the second request with the same lines on."""
    if not head.line or not head.is_http_1_1:
        return False
    if origin in head.decisions:
        return True
    if len(head.decisions) >= _ORIGINS:
        head.decisions.clear()
    head.decisions[origin] = None
    return False
