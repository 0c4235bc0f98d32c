"""The destinations that a NetworkPolicy allows, as sets of networks and names. Pure.

The rules are those of the runtimes: `allowOut` takes precedence over `denyOut`; denying 0.0.0.0/0
closes the internet; allowing it opens the internet. Link-local addresses (cloud metadata) and,
unless the policy allows private networks, private ones are allowed only by an entry within them,
not by a larger network. On one machine such an entry is not enough for private networks; pods reach
it.
"""

import contextlib
import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network

from msgspec import Struct

from paddock.resources.kinds.template import NetworkPolicy

Network = IPv4Network | IPv6Network
EVERYTHING = IPv4Network("0.0.0.0/0")
PRIVATE: tuple[Network, ...] = tuple(
    ipaddress.ip_network(one)
    for one in (
        *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12"),
        "168.63.129.16/32",  # public address by which virtual machines of a cloud reach their host
        *("192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "::1/128", "fc00::/7"),
    )
)
LINK_LOCAL: tuple[Network, ...] = (IPv4Network("169.254.0.0/16"), IPv6Network("fe80::/10"))


class Destinations(Struct, frozen=True, kw_only=True):
    """What a policy allows."""

    is_open: bool
    """Whether destinations that no rule names are allowed."""
    reaches_private: bool = False
    """Whether private networks count as such destinations."""
    allowed: tuple[Network, ...] = ()
    denied: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()
    """Allowed domains in lower case; `*.` in front stands for every name below, at any depth."""

    @property
    def refused(self) -> tuple[Network, ...]:
        """The networks that an open policy refuses, unless `allowed` names them."""
        return (*self.denied, *_special(reaches_private=self.reaches_private))

    def admits(self, network: Network) -> bool:
        """Whether every address of a network is allowed."""
        named = _named(network, reaches_private=self.reaches_private)
        left = minus(named, self.allowed)
        if not self.is_open:
            return not left
        return not any(_overlap(one, other) for one in left for other in self.refused)

    def admits_name(self, name: str) -> bool:
        """Whether a domain is allowed, whatever its addresses are."""
        if self.is_open:
            # The owner of a domain chooses its addresses, so it could name a denied one.
            return not self.denied
        return is_covered(name, self.names)


@lru_cache(maxsize=4096)
def destinations(policy: NetworkPolicy) -> Destinations:
    """Return what a policy allows."""
    allowed: list[Network] = []
    names: set[str] = set()
    for entry in policy.allow_out:
        network = parse_network(entry)
        if network is None:
            names.add(normal_name(entry))
        else:
            allowed += _named(network, reaches_private=policy.allow_private_networks)
    denied = [network for entry in policy.deny_out if (network := parse_network(entry)) is not None]
    is_open = policy.allow_internet_access and EVERYTHING not in denied
    if any(parse_network(entry) == EVERYTHING for entry in policy.allow_out):
        # Allow takes precedence over deny.
        is_open, denied = True, [one for one in denied if one.version != EVERYTHING.version]
        special = _special(reaches_private=policy.allow_private_networks)
        allowed = [
            one
            for one in allowed
            if one.version != EVERYTHING.version or any(_within(one, other) for other in special)
        ]
    return Destinations(
        is_open=is_open,
        reaches_private=policy.allow_private_networks,
        allowed=tuple(allowed),
        denied=tuple(denied) if is_open else (),
        names=frozenset() if is_open else frozenset(names),
    )


def parse_network(entry: str) -> Network | None:
    """Parse an address or CIDR; return `None` for a name."""
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def normal_name(entry: str) -> str:
    """Return a domain in lower case and ASCII, without the final dot."""
    star, rest = ("*.", entry[2:]) if entry.startswith("*.") else ("", entry)
    # What is not a domain stays as it is: the runtime refuses it with a message.
    with contextlib.suppress(UnicodeError):
        rest = rest.encode("idna").decode()
    return star + rest.lower().removesuffix(".")


def is_covered(name: str, names: frozenset[str]) -> bool:
    """Whether every name that `name` stands for is one that `names` stand for."""
    if name in names:
        return True
    labels = name.removeprefix("*.").split(".")
    first = 0 if name.startswith("*.") else 1
    return any(f"*.{'.'.join(labels[at:])}" in names for at in range(first, len(labels)))


def common_names(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Return the names in both sets."""
    return frozenset(
        {name for name in one if is_covered(name, other)}
        | {name for name in other if is_covered(name, one)}
    )


def minus(networks: Iterable[Network], removed: Iterable[Network]) -> list[Network]:
    """Return the networks without the removed ones."""
    left = list(networks)
    for hole in removed:
        left = [part for network in left for part in _without(network, hole)]
    return left


def common(one: Iterable[Network], other: Iterable[Network]) -> list[Network]:
    """Return the networks in both collections."""
    others = list(other)
    found: list[Network] = []
    for first in one:
        for second in others:
            if _within(first, second):
                found.append(first)
            elif _within(second, first):
                found.append(second)
    return list(dict.fromkeys(found))


def _special(*, reaches_private: bool) -> tuple[Network, ...]:
    """Return the networks that only an entry within them allows."""
    return LINK_LOCAL if reaches_private else (*LINK_LOCAL, *PRIVATE)


def _named(network: Network, *, reaches_private: bool) -> list[Network]:
    """Return a network without special addresses, unless it consists of them."""
    special = _special(reaches_private=reaches_private)
    if any(_within(network, one) for one in special):
        return [network]
    return minus((network,), special)


def _without(network: Network, hole: Network) -> list[Network]:
    if not _overlap(network, hole):
        return [network]
    if _within(network, hole):
        return []
    return list(network.address_exclude(hole))  # pyright: ignore[reportArgumentType]


def _within(network: Network, other: Network) -> bool:
    return network.version == other.version and network.subnet_of(other)  # pyright: ignore[reportArgumentType]


def _overlap(one: Network, other: Network) -> bool:
    return one.version == other.version and one.overlaps(other)  # pyright: ignore[reportArgumentType]
