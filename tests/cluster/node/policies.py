"""Render NetworkPolicies as packet-filter rules for the pods of one node. Pure functions.

A cluster's network plugin enforces policies, but the plain plugins of a test node do not. A pod
selected by a policy accepts or opens only allowed connections. The node itself can always reach its
pods, because of probes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]


def ingress(policies: Sequence[Object], pods: Sequence[Object], spaces: Sequence[Object]) -> str:
    """Return the rules for connections to pods."""
    return "\n".join(_rules("Ingress", policies, pods, spaces))


def egress(policies: Sequence[Object], pods: Sequence[Object], spaces: Sequence[Object]) -> str:
    """Return the rules for connections from pods."""
    return "\n".join(_rules("Egress", policies, pods, spaces))


def _rules(
    direction: str, policies: Sequence[Object], pods: Sequence[Object], spaces: Sequence[Object]
) -> Iterator[str]:
    own, other, word = ("saddr", "daddr", "to")
    if direction == "Ingress":
        own, other, word = ("daddr", "saddr", "from")
    held: set[str] = set()
    for policy in policies:
        spec, space = policy["spec"], policy["metadata"]["namespace"]
        if direction not in spec["policyTypes"]:
            continue
        inside = [pod for pod in pods if pod["metadata"]["namespace"] == space]
        chosen = _addresses(inside, spec["podSelector"])
        if not chosen:
            continue
        held |= chosen
        for rule in spec.get(direction.lower(), ()):
            peers = [_peer(other, peer, space, pods, spaces) for peer in rule.get(word) or ()]
            for peer in filter(None, peers) if peers else ("",):
                for ports in _ports(rule.get("ports", ())):
                    yield f"ip {own} {_set(chosen)} {peer} {ports} return"
    if held:
        # Reject instead of drop, so that tests need not wait for a timeout.
        yield f"ip {own} {_set(held)} reject"


def _peer(
    other: str, peer: Object, space: str, pods: Sequence[Object], spaces: Sequence[Object]
) -> str:
    """Return a match for the addresses of a peer; empty if there are none."""
    if block := peer.get("ipBlock"):
        if ":" in block["cidr"]:
            return ""
        but = {text for text in block.get("except", ()) if ":" not in text}
        return f"ip {other} {block['cidr']}" + (f" ip {other} != {_set(but)}" if but else "")
    there = {space}
    if "namespaceSelector" in peer:
        found = [item for item in spaces if _matches(peer["namespaceSelector"], item)]
        there = {item["metadata"]["name"] for item in found}
    inside = [pod for pod in pods if pod["metadata"]["namespace"] in there]
    addresses = _addresses(inside, peer.get("podSelector", {}))
    return f"ip {other} {_set(addresses)}" if addresses else ""


def _ports(ports: Sequence[Object]) -> list[str]:
    by_protocol: dict[str, set[str]] = {}
    for port in ports:
        protocol = port.get("protocol", "TCP").lower()
        by_protocol.setdefault(protocol, set()).add(str(port["port"]))
    return [f"{name} dport {_set(found)}" for name, found in by_protocol.items()] or [""]


def _addresses(pods: Sequence[Object], selector: Object) -> set[str]:
    alive = [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
    found = {pod["status"].get("podIP") for pod in alive if _matches(selector, pod)}
    return {address for address in found if address}


def _matches(selector: Object, item: Object) -> bool:
    assert not selector.get("matchExpressions"), "ours are labels only"
    labels = item["metadata"].get("labels", {})
    return selector.get("matchLabels", {}).items() <= labels.items()


def _set(items: set[str]) -> str:
    return "{ " + ", ".join(sorted(items)) + " }"
