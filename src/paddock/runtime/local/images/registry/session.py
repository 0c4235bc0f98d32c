"""Requests to registries and token servers: through the proxy of the environment, never with
credentials of the environment (`.netrc`), and only to hosts that may be reached.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from paddock.runtime.local.images.registry.guard import (
    GuardedResolver,
    check_host,
    check_target,
)
from paddock.runtime.local.images.registry.settings import RegistrySettings

_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=30, sock_read=60)
_DEFAULT_PORTS = {"http": 80, "https": 443}


class GuardedSession:
    """Sends requests to hosts that tenants and registries name."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings
        self._proxies = getproxies()
        urls = [self._proxies[scheme] for scheme in _DEFAULT_PORTS if scheme in self._proxies]
        resolver = GuardedResolver(settings, frozenset(map(_address, urls)))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, limit_per_host=4),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        data: Any = None,
        timeout: aiohttp.ClientTimeout = _TIMEOUT,
        is_checked: bool = False,
    ) -> aiohttp.ClientResponse:
        """Send a request without following redirects; `ForbiddenError` for a private address.

        `is_checked`: the operator configured the URL, as that of a mirror.
        """
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if not is_checked:
            if self._has_proxy:
                # Also without it for this host: connections to the proxy itself are not checked.
                await check_target(host, port, self._settings)
            else:
                check_host(host, port, self._settings)
        return await self._session.request(
            method,
            url,
            headers=headers,
            params=params,
            data=data,
            timeout=timeout,
            allow_redirects=False,
            proxy=self._proxy(parts.scheme, parts.netloc.rpartition("@")[2]),
        )

    @property
    def _has_proxy(self) -> bool:
        return any(scheme in self._proxies for scheme in _DEFAULT_PORTS)

    def _proxy(self, scheme: str, host: str) -> str | None:
        """Return the proxy for requests to a host, by `http_proxy`, `https_proxy`, `no_proxy`."""
        proxy = self._proxies.get(scheme)
        if proxy is None or proxy_bypass(host):
            return None
        return proxy if "://" in proxy else f"http://{proxy}"


def _address(proxy: str) -> tuple[str, int]:
    """Return host and port of the URL of a proxy."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)
