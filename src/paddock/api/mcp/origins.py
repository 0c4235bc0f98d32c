"""Which web pages may use `/mcp`. Pure.

A page that a browser has loaded could send requests to a server on the user's machine, also under
a name of its own that resolves to this machine (DNS rebinding). Requests of pages carry `Origin`
or `Sec-Fetch-Site`; programs send neither, and are not restricted.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

_LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
_NOT_A_PAGE = frozenset(("", "none"))


class PageOrigins:
    """The origins whose pages may send requests: those of this server."""

    def __init__(self, domain: str) -> None:
        self._domain = _host(f"//{domain}") if domain else ""

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Return why a request is refused, or None."""
        origin = headers.get("origin", "")
        if not origin and headers.get("sec-fetch-site", "") in _NOT_A_PAGE:
            return None
        if not self._is_ours(_host(origin)):
            return f"web pages of {origin or 'unknown origin'} may not use this server"
        host = headers.get("host", "")
        if not self._is_ours(_host(f"//{host}")):
            return f"the host {host!r} is not a name of this server"
        return None

    def _is_ours(self, name: str) -> bool:
        if name in _LOCAL:
            return True
        # Pages of sandboxes have names below the domain: only the domain and its API are ours.
        return bool(self._domain) and name in (self._domain, f"api.{self._domain}")


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
