"""The objects of Paddock on a cluster, which `paddock kube` applies.

`files.py` generates `deploy/kustomize` from them; tests compare them with `deploy/helm`. Pods are
in `roles.py`, accounts in `rights.py`, Services and NetworkPolicies in `network.py`.
"""

from paddock.cli.kube.network import policies, policy, service
from paddock.cli.kube.options import KubeOptions, Manifest, labels, meta
from paddock.cli.kube.rights import GROUP, identity
from paddock.cli.kube.roles import PROBED, budget, deployment, node_agent
from paddock.cli.kube.tls import tls_configuration
from paddock.cli.kube.webhook import webhook
from paddock.resources.registry import KINDS
from paddock.resources.schema.crds import crd


def definitions() -> list[Manifest]:
    """Return the CRDs."""
    return [crd(info) for info in KINDS]


def manifests(options: KubeOptions) -> list[Manifest]:
    """Return all objects of an installation except the CRDs and the Secret, in order."""
    namespace: Manifest = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": options.namespace, "labels": labels()},
    }
    objects = [namespace]
    for component in ("controllers", "api", "gateway"):
        objects += identity(options, component)
        objects.append(deployment(options, component))
        objects.append(budget(options, component))
    objects += [
        service(options, "api", "paddock-api", 3001),
        service(options, "api", "paddock-api-replicas", 3001, headless=True),
        service(options, "gateway", "paddock", 3000, outside=80),
        service(options, "gateway", "paddock-gateway-peers", 3002, headless=True),
        *policies(options),
    ]
    if options.tls_secret:
        objects.append(tls_configuration(options))
    if options.has_node:
        objects += node(options)
    if options.has_webhook:
        objects += webhook(options.namespace, labels("api"), options.ca_bundle)
    if options.monitoring:
        objects.append(monitor(options))
    if options.pool_size:
        objects += _default_pool(options)
    return objects


def secret(options: KubeOptions, *, seed: str, token: str, api_key: str) -> Manifest:
    """Return the Secret that every role reads."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**meta(options, options.secret), "labels": labels()},
        "stringData": {"seed": seed, "token": token, "api-key": api_key},
    }


def node(options: KubeOptions) -> list[Manifest]:
    """Return the agents that freeze pods, one per node; only pods of Paddock may reach them."""
    ours = {"podSelector": {"matchLabels": labels()}}
    rule = {"from": [ours], "ports": [{"port": PROBED["node"]}]}
    return [*identity(options, "node"), node_agent(options), policy(options, "node", [rule])]


def monitor(options: KubeOptions) -> Manifest:
    """Return the PodMonitor for the metrics of all roles."""
    endpoints = [{"port": port, "path": "/metrics"} for port in ("http", "admin")]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": meta(options, "paddock"),
        "spec": {"selector": {"matchLabels": labels()}, "podMetricsEndpoints": endpoints},
    }


def _default_pool(options: KubeOptions) -> list[Manifest]:
    metadata = {"name": "base", "namespace": "default", "labels": labels()}
    return [
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "SandboxTemplate",
            "metadata": metadata,
            "spec": {
                "image": options.default_image,
                "resources": {"cpu": "1", "memory": "1Gi"},
                "description": "The default template.",
            },
        },
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "SandboxPool",
            "metadata": metadata,
            "spec": {"templateRef": {"name": "base"}, "replicas": options.pool_size},
        },
    ]
