"""Routing and access decisions, cached per set of header lines.

Requests of one client differ in their request line and hardly in their headers. If the headers
named the sandbox and authorized the request, and nothing changed since (the same route object,
the same client origin), only the request line of the next request must be checked: that it names
no other sandbox and no internal path. Everything else takes the full path in `service`.
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
"""Origins cached per set of header lines: more clients than this do not share a token."""


class CachedDecision(Struct, frozen=True, eq=False):
    """Where requests with the same header lines go, from clients of one origin."""

    route: Route
    """The decision is valid as long as the table holds this very object."""
    port: int
    lines: bytes
    """Everything after the request line, as the sandbox receives it."""
    idle_connections: IdleConnections
    traffic: SandboxTraffic
    in_flight: set[Exchange]
    """All requests of the sandbox that are in flight."""


def applies(head: RequestHead, port: int) -> bool:
    """Whether the request line allows the decision made for the header lines."""
    target, method = head.target, head.method
    if not head.line or target.startswith("/kruise/") or method == "OPTIONS":
        return False
    # The API's connect call, on which older SDKs send the sandbox headers too.
    if method == "POST" and target.endswith("/connect"):
        return False
    return port != ENVD_PORT or canonical(target.partition("?")[0]) not in INTERNAL_PATHS


def should_cache(head: RequestHead, origin: str) -> bool:
    """Whether to cache a decision: from the second request with the same lines on."""
    if not head.line or not head.is_http_1_1 or head.fetch_site or head.page_origin:
        # Requests of browsers, and their responses, are handled by their full address.
        return False
    if origin in head.decisions:
        return True
    if len(head.decisions) >= _ORIGINS:
        head.decisions.clear()
    head.decisions[origin] = None
    return False
