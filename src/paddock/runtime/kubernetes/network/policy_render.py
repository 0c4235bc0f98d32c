"""Render egress policies as NetworkPolicies: one per distinct policy, shared by all its pods.

A label on the pod selects its policy, so a new sandbox or a changed policy costs only a label.
NetworkPolicies support addresses only; host names are rejected, not ignored.
"""

import hashlib
import ipaddress
from typing import Any

import msgspec

from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.resources.kinds.pods import NetworkPolicyManifest
from paddock.resources.meta import ObjectMeta
from paddock.resources.network import destinations
from paddock.runtime.kubernetes import names
from paddock.runtime.port import EgressPolicy

_PRIVATE = tuple(
    network
    for network in (*destinations.PRIVATE, *destinations.LINK_LOCAL)
    if network.version == 4 or not network.is_loopback  # within ::/96
)
_EMBEDDING = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""Networks whose addresses contain an IPv4 address, besides those of `_detours`."""
_REVISION = 3
"""Part of the names: existing policies are not updated when they are rendered differently."""
Network = destinations.Network
_EVERYTHING: tuple[Network, ...] = (
    ipaddress.IPv4Network("0.0.0.0/0"),
    ipaddress.IPv6Network("::/0"),
)


def policy_name(policy: EgressPolicy, system_namespace: str) -> str:
    """Return the name of this policy; it is the same in every namespace."""
    text = msgspec.json.encode((policy, system_namespace, _REVISION))
    return "paddock-" + hashlib.sha256(text).hexdigest()[:12]


def network_policy(
    policy: EgressPolicy, namespace: str, *, system_namespace: str
) -> NetworkPolicyManifest:
    """Render the NetworkPolicy: allowed egress, and ingress from the system namespace only."""
    name = policy_name(policy, system_namespace)
    return NetworkPolicyManifest(
        metadata=ObjectMeta(
            name=name, namespace=namespace, labels={names.LABEL_MANAGED: names.MANAGER}
        ),
        spec={
            "podSelector": {"matchLabels": {names.LABEL_EGRESS: name}},
            "policyTypes": ["Ingress", "Egress"],
            # Only gateways, the API and controllers connect to a sandbox directly.
            "ingress": [{"from": [_namespace(system_namespace)]}],
            "egress": _egress(policy),
        },
    )


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _egress(policy: EgressPolicy) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = [_dns(policy)]
    private: list[Network] = [*_PRIVATE, *_EMBEDDING]
    private += [
        way for one in _PRIVATE if isinstance(one, ipaddress.IPv4Network) for way in _detours(one)
    ]
    closed = [] if policy.allow_private else private
    allowed = [_block(text) for text in policy.allow_out]
    if allowed:
        # A network that contains private ones does not open them: an entry must name them.
        rules.append({"to": [_ip_block(net, closed) for net in allowed]})
    denied = [_block(text) for text in policy.deny_out]
    # To deny everything closes the internet, as on one machine.
    if policy.allow_internet and _EVERYTHING[0] not in denied:
        open_to = [net for net in _EVERYTHING if net not in denied]
        rules.append({"to": [_ip_block(net, [*denied, *closed]) for net in open_to]})
    return rules


def _dns(policy: EgressPolicy) -> dict[str, Any]:
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    if policy.dns_servers:
        blocks = [_block(text) for text in policy.dns_servers]
        return {"to": [{"ipBlock": {"cidr": str(net)}} for net in blocks], "ports": ports}
    cluster_dns = {
        **_namespace("kube-system"),
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    return {"to": [cluster_dns], "ports": ports}


def _ip_block(network: Network, excepted: list[Network]) -> dict[str, Any]:
    """Return the peer for a network without those excepted networks that it strictly contains."""
    inner = sorted({str(one) for one in excepted if one != network and _contains(network, one)})
    block: dict[str, Any] = {"cidr": str(network)}
    if inner:
        block["except"] = inner
    return {"ipBlock": block}


def _detours(network: ipaddress.IPv4Network) -> tuple[ipaddress.IPv6Network, ...]:
    """Return the IPv6 networks by which NAT64 and 6to4 gateways lead to an IPv4 network."""
    first, size = int(network.network_address), network.prefixlen
    nat64 = int(ipaddress.IPv6Address("64:ff9b::")) | first
    return (
        ipaddress.IPv6Network((nat64, 96 + size)),
        ipaddress.IPv6Network((0x2002 << 112 | first << 80, 16 + size)),
    )


def _contains(network: Network, other: Network) -> bool:
    return network.version == other.version and other.subnet_of(network)  # pyright: ignore[reportArgumentType]


def _block(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        if "/" in text:
            raise InvalidError(f"{text!r} is neither an address nor a CIDR: {error}") from error
        raise UnsupportedError(
            f"the egress rule {text!r} names a host, but NetworkPolicies support addresses only",
            hint="use addresses or CIDRs on Kubernetes",
        ) from error
