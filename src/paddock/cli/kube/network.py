"""Services and NetworkPolicies of the roles on a cluster."""

from paddock.cli.kube.options import KubeOptions, Manifest, labels, meta
from paddock.cli.kube.tls import TLS_PORT
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
    """Return the Service of a role."""
    spec: Manifest = {
        "selector": labels(component),
        "ports": [{"name": "http", "port": outside or port, "targetPort": port}],
    }
    if outside and options.tls_secret:
        spec["ports"] = [{"name": "https", "port": 443, "targetPort": TLS_PORT}]
    if headless:
        # Replicas must find each other before they are ready.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(options, name, component),
        "spec": spec,
    }


def policies(options: KubeOptions) -> list[Manifest]:
    """Return the policies of Paddock's pods: clients may reach gateways only.

    Every network allows the probes of the kubelet.
    """
    peers: list[Manifest] = [{"podSelector": {"matchLabels": labels()}}]
    if options.monitoring:
        namespace = {"kubernetes.io/metadata.name": options.monitoring}
        peers.append({"namespaceSelector": {"matchLabels": namespace}})
    api: list[Manifest] = [{"from": peers, "ports": [{"port": 3001}]}]
    if options.has_webhook:
        # The API server of the cluster has a node address, which no selector matches.
        api.append({"ports": [{"port": WEBHOOK_PORT}]})
    clients = TLS_PORT if options.tls_secret else 3000
    return [
        policy(options, "api", api),
        policy(options, "controllers", [{"from": peers, "ports": [{"port": 3001}]}]),
        policy(
            options,
            "gateway",
            [{"ports": [{"port": clients}]}, {"from": peers, "ports": [{"port": 3002}]}],
        ),
    ]


def policy(options: KubeOptions, component: str, rules: list[Manifest]) -> Manifest:
    """Return a policy that allows only ingress that matches the rules."""
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
