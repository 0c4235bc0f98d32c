"""Addresses of clients, as limits count them."""

import ipaddress
from functools import lru_cache

_IPV6_PREFIX = 64
"""A client of IPv6 usually has a network of this size and can use any address in it."""


@lru_cache(4096)
def client_network(address: str) -> str:
    """Return what one client counts as: an IPv4 address, or the /64 network of an IPv6 address.

    Text that is not an address is returned unchanged.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
