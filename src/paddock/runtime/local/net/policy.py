"""Compile an `EgressPolicy` to rules for the firewall and the resolver. Pure functions.

Order of evaluation, the first match wins:
  1. always denied: this machine, except the ports that the operator names, multicast, other
     sandboxes;
  2. denied unless `allow_private`: private, link-local (cloud metadata), carrier-grade ranges,
     except the networks that the operator opens for all sandboxes;
  3. allowed: addresses and networks of `allow_out`, then resolved addresses of its domains;
  4. denied even with `allow_private`: link-local addresses not named by `allow_out`;
  5. denied: `deny_out`;
  6. everything else: according to `allow_internet` (`deny_out` of 0.0.0.0/0 equals false).
IPv6 is not routed at all, so nothing can be allowed there.
"""

import ipaddress
import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from msgspec import Struct

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.network import destinations
from paddock.runtime.port import EgressPolicy

EVERYTHING = IPv4Network("0.0.0.0/0")
LINK_LOCAL = IPv4Network("169.254.0.0/16")
PRIVATE = tuple(
    sorted(
        network
        for network in (*destinations.PRIVATE, *destinations.LINK_LOCAL)
        # Loopback is refused always (`NEVER`); private IPv6 is checked by `UNIQUE_LOCAL`.
        if isinstance(network, IPv4Network) and not network.is_loopback
    )
)
NEVER = tuple(IPv4Network(one) for one in ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3"))
GLOBAL_UNICAST = IPv6Network("2000::/3")
UNIQUE_LOCAL = IPv6Network("fc00::/7")
NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
"""Upper half of an interface id whose lower half is an IPv4 address."""
MAX_ENTRIES = 1000
MAX_DNS_SERVERS = 8

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBERS_ONLY = re.compile(r"[0-9.:/]+|0x[0-9a-f.]+")


class EgressRules(Struct, frozen=True, kw_only=True):
    """A compiled policy. The networks of `allowed` do not overlap, nor those of `denied`."""

    is_open: bool
    """Whether destinations that no rule names are allowed."""
    reaches_private: bool = False
    allowed: tuple[IPv4Network, ...] = ()
    denied: tuple[IPv4Network, ...] = ()
    domains: frozenset[str] = frozenset()
    """Lower case, without the final dot."""
    wildcards: frozenset[str] = frozenset()
    """`example.com` matches every name below it at any depth, but not itself."""
    dns_servers: tuple[str, ...] = ()

    def resolves(self, name: str) -> bool:
        """Whether a name (lower case, no final dot) may be resolved."""
        if self.is_open or name in self.domains:
            return True
        if not self.wildcards:
            return False
        labels = name.split(".")
        return any(".".join(labels[at:]) in self.wildcards for at in range(1, len(labels)))

    @property
    def admits_answers(self) -> bool:
        """Whether the firewall must admit each resolved address."""
        return not self.is_open and bool(self.domains or self.wildcards)


CLOSED = EgressRules(is_open=False)
"""No egress: the rules of a sandbox whose policy is unknown."""


def compile_policy(policy: EgressPolicy, *, root: str = "") -> EgressRules:
    """Compile a policy. Raises `InvalidError` with every invalid field.

    `root` is a prefix of the field names in errors.
    """
    problems: list[FieldProblem] = []
    where = f"{root}." if root else ""
    denied = _networks(policy.deny_out, f"{where}deny_out", problems)
    is_open = policy.allow_internet and EVERYTHING not in denied
    allowed, domains, wildcards = _allowed(policy.allow_out, f"{where}allow_out", problems)
    if (domains or wildcards) and is_open:
        problems.append(
            FieldProblem(
                f"{where}allow_out",
                "domains restrict nothing while the internet is open; "
                "set allow_internet to false or deny_out to 0.0.0.0/0",
            )
        )
    servers = _dns_servers(policy, f"{where}dns_servers", problems)
    if problems:
        listed = "; ".join(str(problem) for problem in problems[:10])
        raise InvalidError(f"the egress policy is invalid: {listed}", problems=problems)
    if EVERYTHING in allowed:  # Allow takes precedence over deny.
        is_open, denied = True, ()
        allowed = tuple(one for one in allowed if one.subnet_of(LINK_LOCAL))
    return EgressRules(
        is_open=is_open,
        reaches_private=policy.allow_private,
        allowed=allowed,
        denied=denied if is_open else (),
        domains=frozenset(domains),
        wildcards=frozenset(wildcards),
        dns_servers=servers,
    )


def is_admissible(
    address: IPv4Address,
    *,
    reaches_private: bool,
    private_networks: tuple[IPv4Network, ...] = (),
) -> bool:
    """Whether a resolved address of an allowed name may be admitted.

    `private_networks` are those that every sandbox may reach.
    """
    if any(address in network for network in NEVER) or address in LINK_LOCAL:
        return False
    if reaches_private or any(address in network for network in private_networks):
        return True
    return not any(address in network for network in PRIVATE)


def _allowed(
    entries: tuple[str, ...], path: str, problems: list[FieldProblem]
) -> tuple[tuple[IPv4Network, ...], list[str], list[str]]:
    networks: list[IPv4Network] = []
    domains: list[str] = []
    wildcards: list[str] = []
    _limit(entries, path, problems)
    for at, entry in enumerate(entries[:MAX_ENTRIES]):
        try:
            network = _network(entry)
            if network is not None:
                networks.append(network)
            elif entry.startswith("*."):
                wildcards.append(_domain(entry[2:]))
            else:
                domains.append(_domain(entry))
        except ValueError as error:
            problems.append(FieldProblem(f"{path}[{at}]", str(error)))
    return _normalize(networks), domains, wildcards


def _networks(
    entries: tuple[str, ...], path: str, problems: list[FieldProblem]
) -> tuple[IPv4Network, ...]:
    found: list[IPv4Network] = []
    _limit(entries, path, problems)
    for at, entry in enumerate(entries[:MAX_ENTRIES]):
        try:
            network = None if _is_ipv6(entry) else _network(entry)
        except ValueError as error:
            problems.append(FieldProblem(f"{path}[{at}]", str(error)))
            continue
        if network is not None:
            found.append(network)
        elif not _is_ipv6(entry):  # IPv6 is denied anyway.
            message = f"{entry!r} is not an address or CIDR; domains can only be allowed"
            problems.append(FieldProblem(f"{path}[{at}]", message))
    return tuple(ipaddress.collapse_addresses(found))


def _network(entry: str) -> IPv4Network | None:
    """Parse an address or CIDR; return `None` for a name."""
    if _is_ipv6(entry):
        raise ValueError(f"{entry!r} is IPv6, which sandboxes do not have")
    try:
        return IPv4Network(entry)
    except ValueError as error:
        if "host bits set" in str(error):
            proper = IPv4Network(entry, strict=False)
            raise ValueError(f"{entry!r} has host bits set; did you mean {proper}?") from error
        if "/" in entry or _NUMBERS_ONLY.fullmatch(entry.lower()):
            raise ValueError(f"{entry!r} is not an IPv4 address or CIDR") from error
        return None


def _is_ipv6(entry: str) -> bool:
    try:
        ipaddress.IPv6Network(entry, strict=False)
    except ValueError:
        return False
    return True


def _domain(entry: str) -> str:
    try:
        name = entry.encode("idna").decode().lower().removesuffix(".") if entry else ""
    except UnicodeError as error:
        raise ValueError(f"{entry!r} is not a domain name ({error})") from error
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{entry!r} is not an address, a CIDR or a domain (`*.` only in front)")
    if labels[-1].isdigit():
        raise ValueError(f"{entry!r} is not an IPv4 address, and no domain ends in a number")
    return name


def _dns_servers(policy: EgressPolicy, path: str, problems: list[FieldProblem]) -> tuple[str, ...]:
    if len(policy.dns_servers) > MAX_DNS_SERVERS:
        problems.append(FieldProblem(path, f"at most {MAX_DNS_SERVERS} servers"))
    for at, entry in enumerate(policy.dns_servers[:MAX_DNS_SERVERS]):
        try:
            address = ipaddress.ip_address(entry)
        except ValueError:
            problems.append(FieldProblem(f"{path}[{at}]", f"{entry!r} is not an address"))
            continue
        # The host queries these servers: a sandbox must not direct it to private addresses.
        if not _is_valid_dns_server(address, reaches_private=policy.allow_private):
            message = f"{entry} is not a public address"
            problems.append(FieldProblem(f"{path}[{at}]", message))
    return policy.dns_servers


def _is_valid_dns_server(address: IPv4Address | IPv6Address, *, reaches_private: bool) -> bool:
    """Whether the host may send queries to this address for a sandbox.

    Of IPv6 only global addresses are accepted, and with `reaches_private` unique local ones. So
    addresses of which a part is an IPv4 address somewhere else (mapped, compatible, translated) are
    refused, and the IPv4 address in a NAT64, 6to4 or ISATAP address must be valid itself.
    """
    if isinstance(address, IPv4Address):
        return is_admissible(address, reaches_private=reaches_private)
    if address.scope_id is not None or address.teredo is not None:
        return False
    if not all(is_admissible(one, reaches_private=reaches_private) for one in _embedded(address)):
        return False
    if address in NAT64 or address.sixtofour is not None:
        return True
    if address in GLOBAL_UNICAST:
        return reaches_private or not address.is_private
    return reaches_private and address in UNIQUE_LOCAL


def _embedded(address: IPv6Address) -> list[IPv4Address]:
    """Return the IPv4 addresses to which a gateway may pass packets for this address on."""
    lowest = IPv4Address(int(address) & 0xFFFF_FFFF)
    found = [lowest] if address in NAT64 else []
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
        found.append(lowest)
    return found


def _normalize(networks: list[IPv4Network]) -> tuple[IPv4Network, ...]:
    """Remove overlaps, and link-local addresses from larger networks that contain them."""
    named = [network for network in networks if network.subnet_of(LINK_LOCAL)]
    others: list[IPv4Network] = []
    for network in ipaddress.collapse_addresses(one for one in networks if one not in named):
        if network != EVERYTHING and LINK_LOCAL.subnet_of(network):
            others.extend(network.address_exclude(LINK_LOCAL))
        else:
            others.append(network)
    return tuple(sorted([*ipaddress.collapse_addresses(named), *others]))


def _limit(entries: tuple[str, ...], path: str, problems: list[FieldProblem]) -> None:
    if len(entries) > MAX_ENTRIES:
        problems.append(FieldProblem(path, f"has {len(entries)} entries; at most {MAX_ENTRIES}"))
