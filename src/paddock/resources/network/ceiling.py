"""A NetworkPolicy as a ceiling: the intersection of two policies, and what exceeds one. Pure.

The policies of a template, a team and the installation are ceilings. A sandbox never gets more
than their intersection; a request that names something outside is refused with the field.
"""

from collections.abc import Iterable
from functools import lru_cache

from msgspec import structs

from paddock.kit.errors import FieldProblem
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.destinations import (
    LINK_LOCAL,
    Destinations,
    Network,
    common,
    common_names,
    destinations,
    minus,
    normal_name,
    parse_network,
)

INTERNET = "allow_internet_access"
PUBLIC_TRAFFIC = "network.allowPublicTraffic"
"""Fields by which a request opens something by a plain `true`."""


@lru_cache(maxsize=4096)
def intersect(policy: NetworkPolicy, ceiling: NetworkPolicy) -> NetworkPolicy:
    """Return the policy that allows what both allow.

    Two things that no policy can express are left out: the addresses of a domain within networks,
    and a domain below a ceiling that denies networks. Networks that the policy (not the ceiling)
    denies are reached by the domains that the ceiling allows: `allowOut` takes precedence.
    """
    if policy == ceiling:
        return policy
    own, limit = destinations(policy), destinations(ceiling)
    names: frozenset[str] = frozenset()
    if own.is_open and limit.is_open:
        allowed = _below_open(own.allowed, limit)
        if limit.denied:
            allowed += _exceptions(limit, own)
    elif limit.is_open:
        allowed = _below_open(own.allowed, limit)
        names = frozenset() if limit.denied else own.names
    elif own.is_open:
        allowed = _exceptions(limit, own)
        names = limit.names
    else:
        allowed = common(own.allowed, limit.allowed)
        names = common_names(own.names, limit.names)
    is_open = own.is_open and limit.is_open
    both = Destinations(
        is_open=is_open,
        reaches_private=own.reaches_private,
        allowed=tuple(dict.fromkeys(allowed)),
        denied=tuple(dict.fromkeys((*limit.denied, *own.denied))) if is_open else (),
        names=names,
    )
    flags = structs.replace(
        policy,
        dns_servers=_dns_servers(policy, ceiling, limit),
        allow_private_networks=policy.allow_private_networks and ceiling.allow_private_networks,
        allow_public_traffic=policy.allow_public_traffic and ceiling.allow_public_traffic,
        mask_request_host=policy.mask_request_host or ceiling.mask_request_host,
    )
    if both == own:
        # The same as text too: people read it.
        return flags
    return structs.replace(
        flags,
        allow_internet_access=is_open,
        allow_out=(*_texts(both.allowed), *sorted(names)),
        deny_out=_texts(both.denied),
    )


def exceeding(
    asked: NetworkPolicy, ceiling: NetworkPolicy, opens: Iterable[str] = ()
) -> list[FieldProblem]:
    """Return the fields of a request that name more than a ceiling allows.

    Defaults name nothing: clients send `allow_internet_access: true` unasked. `opens` are the
    fields with a `true` that the client has set on purpose.
    """
    limit = destinations(ceiling)
    found: list[FieldProblem] = []
    for at, entry in enumerate(asked.allow_out):
        network = parse_network(entry)
        is_within = (
            limit.admits_name(normal_name(entry)) if network is None else limit.admits(network)
        )
        if not is_within:
            found.append(FieldProblem(f"network.allowOut[{at}]", f"{entry} is not allowed"))
    for at, entry in enumerate(asked.dns_servers):
        if not _is_dns_server_within(entry, ceiling, limit):
            found.append(FieldProblem(f"network.dnsServers[{at}]", f"{entry} is not allowed"))
    if INTERNET in opens and not limit.is_open:
        found.append(FieldProblem(INTERNET, "the internet is not allowed"))
    if PUBLIC_TRAFFIC in opens and not ceiling.allow_public_traffic:
        found.append(FieldProblem(PUBLIC_TRAFFIC, "ports without a token are not allowed"))
    return found


def _below_open(networks: Iterable[Network], limit: Destinations) -> list[Network]:
    """Return the part of the networks that an open policy allows."""
    listed = list(networks)
    return [*minus(listed, limit.refused), *common(listed, limit.allowed)]


def _exceptions(limit: Destinations, own: Destinations) -> list[Network]:
    """Return the networks that a ceiling names, as far as an open policy does not deny them.

    Private ones stay: the ceiling is what opens them.
    """
    closed = (*own.denied, *LINK_LOCAL)
    return [*minus(limit.allowed, closed), *common(limit.allowed, own.allowed)]


def _dns_servers(
    policy: NetworkPolicy, ceiling: NetworkPolicy, limit: Destinations
) -> tuple[str, ...]:
    within = tuple(
        server for server in policy.dns_servers if _is_dns_server_within(server, ceiling, limit)
    )
    return within or ceiling.dns_servers


def _is_dns_server_within(server: str, ceiling: NetworkPolicy, limit: Destinations) -> bool:
    """Whether a ceiling allows a DNS server.

    A closed ceiling allows only its own: a server that answers for the allowed domains could open
    any address.
    """
    if ceiling.dns_servers or not limit.is_open:
        return server in ceiling.dns_servers
    network = parse_network(server)
    return network is not None and limit.admits(network)


def _texts(networks: Iterable[Network]) -> tuple[str, ...]:
    return tuple(
        str(one.network_address) if one.prefixlen == one.max_prefixlen else str(one)
        for one in networks
    )
