"""Refuse connections to addresses that a registry must not have.

Tenants choose the host of an image, and a registry chooses where it redirects to and where its
tokens come from. Each host is resolved once, and the connection is made to the address that was
checked. A proxy resolves names itself, so its targets are also checked before each request.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection, Iterable
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from paddock.kit.errors import ForbiddenError
from paddock.resources.network.destinations import LINK_LOCAL, PRIVATE
from paddock.runtime.local.images.registry.settings import RegistrySettings

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")


class PrivateAddressError(OSError):
    """A host has an address that may not be reached. An OSError, because resolvers raise those."""


class GuardedResolver(AbstractResolver):
    """Resolves names, and raises for a private address unless the host may have one.

    Proxies may have one: the operator configured them.
    """

    def __init__(
        self, settings: RegistrySettings, proxies: Collection[tuple[str, int]] = ()
    ) -> None:
        self._settings = settings
        self._proxies = proxies
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        if (host, port) not in self._proxies and not _may_be_private(host, port, self._settings):
            _check_addresses(host, (one["host"] for one in found))
        return found

    async def close(self) -> None:
        await self._resolver.close()


async def check_target(host: str, port: int | None, settings: RegistrySettings) -> None:
    """Raise if a proxy must not be asked to connect to a host: its addresses are resolved here."""
    check_host(host, port, settings)
    if _may_be_private(host, port, settings):
        return
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        _check_addresses(host, (str(one[4][0]) for one in found))
    except PrivateAddressError as error:
        raise refusal(error) from error
    except OSError as error:
        if settings.may_be_unresolved:
            return
        raise ForbiddenError(
            f"{host} cannot be resolved here ({error}), so its address is not checked before the "
            "proxy connects to it",
            hint="an operator allows it with the setting registry_private_hosts",
        ) from error


def check_host(host: str, port: int | None, settings: RegistrySettings) -> None:
    """Raise if a host is a private address; names are checked when they are resolved."""
    if _may_be_private(host, port, settings):
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return
    if is_private(host):
        raise refusal(host)


def _may_be_private(host: str, port: int | None, settings: RegistrySettings) -> bool:
    return settings.may_be_private(host) or settings.may_be_private(f"{host}:{port}")


def _check_addresses(host: str, addresses: Iterable[str]) -> None:
    for address in addresses:
        if is_private(address):
            raise PrivateAddressError(f"{host} has the private address {address}")


def refusal(what: Any) -> ForbiddenError:
    """Return the error for a private address."""
    return ForbiddenError(
        f"{what} is a private address, which images may not be pulled from",
        hint="an operator allows it with the setting registry_private_hosts",
    )


def is_private(address: str) -> bool:
    """Whether an address is not one of the public internet, in whatever form it is written."""
    one = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(one, ipaddress.IPv6Address):
        embedded = one.ipv4_mapped
        if embedded is None and one in _NAT64:
            embedded = ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)
        if embedded is None and one in _SIX_TO_FOUR:
            embedded = one.sixtofour
        if embedded is not None:
            one = embedded
    listed = any(one in network for network in (*PRIVATE, *LINK_LOCAL))
    return listed or not one.is_global or one.is_multicast
