"""What web pages may request, by the headers with which browsers describe a request. Pure.

The API and sandboxes that are addressed by path share one origin in a browser: a page of such a
sandbox can rewrite its own URL and hide its referrer, so pages of one origin cannot be told
apart. Therefore no page may call the API without credentials of its own, wherever it is from.
Pages of other sites may open pages of a sandbox, but not read what it serves.

Browsers send `Sec-Fetch-*` to https and localhost addresses only; elsewhere `Origin` is the only
evidence of a page. Programs send neither, and are not restricted.
"""

from paddock.gateway.http.request_heads import RequestHead
from paddock.gateway.routing.addressing import ENVD_PORT, TASKS_PORT, Destination

NEEDS_CREDENTIALS = "web pages need an API key or a token of their own to call the API"
CROSS_SITE = (
    "pages of other sites cannot read from a sandbox that is addressed by path: "
    "address it by host, as <port>-<id>.<domain>"
)
WORKER_SCOPE = "a service worker of a sandbox must be below /kruise/<id>/<port>/"

_SAME_SITE = frozenset((b"", b"none", b"same-origin"))
_READS = frozenset(("GET", "HEAD"))


def is_page(head: RequestHead) -> bool:
    """Whether a web page caused the request, and not a program or the user of a browser."""
    if head.fetch_site:
        return head.fetch_site != b"none"
    return bool(head.page_origin)


def api_refusal(head: RequestHead) -> str | None:
    """Return why a request to the API is refused, or None."""
    if head.service_worker:
        # Its scope would be the whole origin.
        return WORKER_SCOPE
    if is_page(head) and not head.has_credentials:
        return NEEDS_CREDENTIALS
    return None


def sandbox_refusal(head: RequestHead, destination: Destination) -> str | None:
    """Return why a request to a sandbox is refused, or None."""
    prefix = destination.prefix
    if prefix is None:
        return None
    if head.service_worker and not (prefix and head.target.startswith(f"{prefix}/")):
        return WORKER_SCOPE
    if not prefix or head.fetch_site in _SAME_SITE or destination.port in (ENVD_PORT, TASKS_PORT):
        return None
    if head.access_token is not None or head.traffic_token is not None:
        return None
    if head.method == "OPTIONS":
        # A preflight cannot carry a token; the request after it can.
        return None
    if head.method in _READS and head.fetch_mode == b"navigate":
        # Another site can open or embed a page, but not read it.
        return None
    return CROSS_SITE
