"""By which names roles are reached on a cluster, and by whom."""

from paddock.cli.kube.options import KubeOptions, Manifest, labels, meta
from paddock.cli.kube.webhook import WEBHOOK_PORT


def service(
    options: KubeOptions,
    component: str,
    name: str,
    port: int,
    *,
    headless: bool = False,
    outside: int | None = None,
) -> Manifest:
    """Give the name by which a role is reached."""
    spec: Manifest = {
        "selector": labels(component),
        "ports": [{"name": "http", "port": outside or port, "targetPort": port}],
    }
    if headless:
        # Replicas must know each other before they are ready to serve.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(options, name, component),
        "spec": spec,
    }


def policies(options: KubeOptions) -> list[Manifest]:
    """Close Paddock's own pods: clients reach gateways, and everything else is among themselves.

    (A node's own probes are let in by every network.)
    """
    friends: list[Manifest] = [{"podSelector": {"matchLabels": labels()}}]
    if options.monitoring:
        there = {"kubernetes.io/metadata.name": options.monitoring}
        friends.append({"namespaceSelector": {"matchLabels": there}})
    api: list[Manifest] = [{"from": friends, "ports": [{"port": 3001}]}]
    if options.has_webhook:
        # The cluster's API server has an address of the node's, which no selector knows.
        api.append({"ports": [{"port": WEBHOOK_PORT}]})
    return [
        policy(options, "api", api),
        policy(options, "controllers", [{"from": friends, "ports": [{"port": 3001}]}]),
        policy(
            options,
            "gateway",
            [{"ports": [{"port": 3000}]}, {"from": friends, "ports": [{"port": 3002}]}],
        ),
    ]


def policy(options: KubeOptions, component: str, rules: list[Manifest]) -> Manifest:
    """Let nobody reach a role but those whom the rules name."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta(options, f"paddock-{component}", component),
        "spec": {
            "podSelector": {"matchLabels": labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }
