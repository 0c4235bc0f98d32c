"""Paddock's own objects on a cluster, as plain data: what `paddock kube` applies.

`kube_files` writes `deploy/kustomize` from here, and `deploy/helm` says the same; tests compare.
Rights are the least each role works with: gateways read Sandboxes, and nobody but the API's
replicas writes keys.
"""

from msgspec import Struct

from paddock.cli.kube_webhook import (
    WEBHOOK_CONTAINER,
    WEBHOOK_PORT,
    WEBHOOK_VOLUME,
    Manifest,
    webhook,
)
from paddock.resources.crds import crd
from paddock.resources.registry import KINDS

GROUP = "paddock.dev"
READ = ("get", "list", "watch")
WRITE = ("create", "update", "delete")


class KubeOptions(Struct, frozen=True, kw_only=True):
    """What can be chosen."""

    image: str = "paddock"
    namespace: str = "paddock-system"
    replicas: int = 2
    has_node: bool = False
    pool_size: int = 2
    default_image: str = "debian:13"
    secret: str = "paddock"  # noqa: S105 - an object's name
    """Name of the Secret with seed, token and api-key."""
    has_webhook: bool = False
    """Whether an admission webhook checks what people apply."""
    ca_bundle: str = ""
    """Base64 of the certificate that the webhook shows; empty: cert-manager fills it in."""
    monitoring: str = ""
    """Namespace whose pods read metrics; empty: nobody is let in for that."""


def _rule(group: str, resources: str, *verbs: str) -> Manifest:
    return {"apiGroups": [group], "resources": resources.split(), "verbs": [*verbs]}


CLUSTER_RULES: dict[str, list[Manifest]] = {
    "controllers": [
        _rule(
            GROUP,
            "sandboxes sandboxpools sandboxclaims checkpoints batchsandboxes sandboxenvs "
            "sandboxtemplates",
            *READ,
        ),
        _rule(GROUP, "sandboxes sandboxpools checkpoints", *WRITE),
        _rule(GROUP, "sandboxclaims batchsandboxes sandboxenvs", "update", "delete"),
        _rule(
            GROUP,
            "sandboxes/status sandboxpools/status sandboxclaims/status checkpoints/status "
            "batchsandboxes/status sandboxenvs/status",
            "update",
        ),
        _rule("", "pods persistentvolumeclaims", *READ, "create", "patch", "delete"),
        _rule("", "pods/resize", "get", "patch"),
        _rule("networking.k8s.io", "networkpolicies", "get", "list", "create", "delete"),
        _rule("", "events", "get", "list", "create", "patch"),
    ],
    "api": [
        _rule(
            GROUP,
            "sandboxes sandboxpools sandboxclaims checkpoints batchsandboxes sandboxenvs "
            "sandboxtemplates",
            *READ,
        ),
        _rule(GROUP, "sandboxes checkpoints sandboxtemplates batchsandboxes", *WRITE),
        _rule(GROUP, "sandboxes/status", "update"),
        _rule("", "pods/resize", "get", "patch"),
    ],
    "gateway": [_rule(GROUP, "sandboxes", *READ)],
}
"""What each role may do everywhere."""

OWN_RULES: dict[str, list[Manifest]] = {
    "controllers": [
        # Who leads, shares of quotas, and the sweeping of old idempotency keys.
        _rule("coordination.k8s.io", "leases", *READ, "create", "patch", "delete"),
        _rule("", "secrets", *READ),
    ],
    "api": [
        _rule("", "secrets", *READ, "create", "patch", "delete"),
        # Shares of quotas, and who is first with an idempotency key.
        _rule("coordination.k8s.io", "leases", *READ, "create", "patch", "delete"),
    ],
}
"""What each role may do in Paddock's own namespace."""


def definitions() -> list[Manifest]:
    """Give the CRDs."""
    return [crd(info) for info in KINDS]


def labels(component: str | None = None) -> dict[str, str]:
    """Give the labels of Paddock's own objects."""
    found = {"app.kubernetes.io/name": "paddock", "app.kubernetes.io/part-of": "paddock"}
    return found if component is None else {**found, "app.kubernetes.io/component": component}


def manifests(options: KubeOptions) -> list[Manifest]:
    """Give every object of an installation but the CRDs and the Secret, in order."""
    namespace: Manifest = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": options.namespace, "labels": labels()},
    }
    made = [namespace]
    for component in ("controllers", "api", "gateway"):
        made += _identity(options, component)
        made.append(_deployment(options, component))
        made.append(_budget(options, component))
    made += [
        _service(options, "api", "paddock-api", 3001),
        _service(options, "api", "paddock-api-replicas", 3001, headless=True),
        _service(options, "gateway", "paddock", 3000, outside=80),
        _service(options, "gateway", "paddock-gateway-peers", 3002, headless=True),
        *_policies(options),
    ]
    if options.has_node:
        made += node(options)
    if options.has_webhook:
        made += webhook(options.namespace, labels("api"), options.ca_bundle)
    if options.monitoring:
        made.append(monitor(options))
    if options.pool_size:
        made += _default_pool(options)
    return made


def secret(options: KubeOptions, *, seed: str, token: str, api_key: str) -> Manifest:
    """Give the Secret that every role reads."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**_meta(options, options.secret), "labels": labels()},
        "stringData": {"seed": seed, "token": token, "api-key": api_key},
    }


def _meta(options: KubeOptions, name: str, component: str | None = None) -> Manifest:
    return {"name": name, "namespace": options.namespace, "labels": labels(component)}


def _identity(options: KubeOptions, component: str) -> list[Manifest]:
    name = f"paddock-{component}"
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": options.namespace}
    made: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": _meta(options, name, component),
            "automountServiceAccountToken": component != "node",
        }
    ]
    for kind, rules in (("ClusterRole", CLUSTER_RULES), ("Role", OWN_RULES)):
        if component not in rules:
            continue
        metadata = _meta(options, name, component)
        if kind == "ClusterRole":
            metadata.pop("namespace")
        made += [
            {
                "apiVersion": f"{rbac}/v1",
                "kind": kind,
                "metadata": metadata,
                "rules": rules[component],
            },
            {
                "apiVersion": f"{rbac}/v1",
                "kind": f"{kind}Binding",
                "metadata": metadata,
                "roleRef": {"apiGroup": rbac, "kind": kind, "name": name},
                "subjects": [subject],
            },
        ]
    return made


def _environment(options: KubeOptions, component: str) -> list[Manifest]:
    def from_secret(name: str, key: str) -> Manifest:
        reference = {"name": options.secret, "key": key}
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}

    inside = f"{options.namespace}.svc"
    values = {
        "PADDOCK_STORE": "kubernetes",
        "PADDOCK_RUNTIME": "kubernetes",
        "PADDOCK_AGENT_IMAGE": options.image,
        "PADDOCK_SYSTEM_NAMESPACE": options.namespace,
        "PADDOCK_STATE_DIR": "/tmp",  # noqa: S108 - a pod's own
        "PADDOCK_LOG_JSON": "true",
        "PADDOCK_API_HOST": f"paddock-api.{inside}" if component == "gateway" else "0.0.0.0",  # noqa: S104
        "PADDOCK_API_PORT": "3001",
    }
    if component == "api":
        values["PADDOCK_API_PEERS"] = f"dns:paddock-api-replicas.{inside}:3001"
    if component in ("gateway", "controllers"):
        # Gateways tell each other of routes; whoever leads asks them which sandboxes are idle.
        values["PADDOCK_PEERS"] = f"dns:paddock-gateway-peers.{inside}:3002"
    if component == "gateway":
        values |= {
            "PADDOCK_HOST": "0.0.0.0",  # noqa: S104 - inside a pod
            "PADDOCK_PORT": "3000",
            "PADDOCK_ADMIN_PORT": "3002",
        }
    found: list[Manifest] = [{"name": name, "value": text} for name, text in values.items()]
    if component == "gateway":
        # By this address it tells the API and other gateways where it is.
        own = {"fieldRef": {"fieldPath": "status.podIP"}}
        found.append({"name": "PADDOCK_ADMIN_HOST", "valueFrom": own})
    found += [from_secret("PADDOCK_SEED", "seed"), from_secret("PADDOCK_TOKEN", "token")]
    if component == "api":
        found.append(from_secret("PADDOCK_API_KEY", "api-key"))
    return found


_PORTS = {
    "controllers": [("http", 3001)],
    "api": [("http", 3001)],
    "gateway": [("traffic", 3000), ("admin", 3002)],
    "node": [("orders", 49985)],
}
_PROBED = {"controllers": 3001, "api": 3001, "gateway": 3002, "node": 49985}
_REQUESTS = {
    "controllers": {"cpu": "200m", "memory": "256Mi"},
    "api": {"cpu": "200m", "memory": "256Mi"},
    "gateway": {"cpu": "100m", "memory": "128Mi"},
    "node": {"cpu": "10m", "memory": "64Mi"},
}


def _container(options: KubeOptions, component: str) -> Manifest:
    probed = _PROBED[component]
    ready = "/healthz" if component == "node" else "/readyz"
    return {
        "name": component,
        "image": options.image,
        "args": [component],
        "env": _environment(options, component),
        "ports": [{"name": name, "containerPort": port} for name, port in _PORTS[component]],
        "readinessProbe": {"httpGet": {"path": ready, "port": probed}, "periodSeconds": 5},
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": probed},
            "periodSeconds": 10,
            "failureThreshold": 6,
        },
        "resources": {"requests": _REQUESTS[component]},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }


def _deployment(options: KubeOptions, component: str) -> Manifest:
    # Service links would be variables such as PADDOCK_PORT, and taken for settings.
    selector = labels(component)
    container = _container(options, component)
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}]
    if component == "api" and options.has_webhook:
        for name, additions in WEBHOOK_CONTAINER.items():
            container[name] += additions
        volumes.append(WEBHOOK_VOLUME)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(options, f"paddock-{component}", component),
        "spec": {
            "replicas": options.replicas,
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {"labels": selector},
                "spec": {
                    "serviceAccountName": f"paddock-{component}",
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 30,
                    "topologySpreadConstraints": [spread],
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }


def node(options: KubeOptions) -> list[Manifest]:
    """Give the agents that freeze pods, one per node; only Paddock's own pods reach them."""
    ours = {"podSelector": {"matchLabels": labels()}}
    rule = {"from": [ours], "ports": [{"port": _PROBED["node"]}]}
    return [*_identity(options, "node"), _node(options), _policy(options, "node", [rule])]


def _node(options: KubeOptions) -> Manifest:
    container = _container(options, "node")
    container["securityContext"] = {
        # Freezing is writing to files of the host's cgroup tree, which belong to root.
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container["volumeMounts"].append({"name": "cgroup", "mountPath": "/sys/fs/cgroup"})
    selector = labels("node")
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": _meta(options, "paddock-node", "node"),
        "spec": {
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {"labels": selector},
                "spec": {
                    "serviceAccountName": "paddock-node",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [container],
                    "volumes": [
                        {"name": "tmp", "emptyDir": {}},
                        {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup"}},
                    ],
                },
            },
        },
    }


def _budget(options: KubeOptions, component: str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(options, f"paddock-{component}", component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(component)}},
    }


def _service(
    options: KubeOptions,
    component: str,
    name: str,
    port: int,
    *,
    headless: bool = False,
    outside: int | None = None,
) -> Manifest:
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
        "metadata": _meta(options, name, component),
        "spec": spec,
    }


def _policies(options: KubeOptions) -> list[Manifest]:
    """Close Paddock's own pods: clients reach gateways, gateways and replicas reach the API."""
    friends: list[Manifest] = [{"podSelector": {"matchLabels": labels()}}]
    if options.monitoring:
        there = {"kubernetes.io/metadata.name": options.monitoring}
        friends.append({"namespaceSelector": {"matchLabels": there}})
    api: list[Manifest] = [{"from": friends, "ports": [{"port": 3001}]}]
    if options.has_webhook:
        # The cluster's API server has an address of the node's, which no selector knows.
        api.append({"ports": [{"port": WEBHOOK_PORT}]})
    return [
        _policy(options, "api", api),
        _policy(options, "controllers", [{"ports": [{"port": 3001}]}]),
        _policy(
            options,
            "gateway",
            [{"ports": [{"port": 3000}]}, {"from": friends, "ports": [{"port": 3002}]}],
        ),
    ]


def _policy(options: KubeOptions, component: str, rules: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(options, f"paddock-{component}", component),
        "spec": {
            "podSelector": {"matchLabels": labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def monitor(options: KubeOptions) -> Manifest:
    """Let a Prometheus operator find every role's metrics."""
    endpoints = [{"port": port, "path": "/metrics"} for port in ("http", "admin")]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _meta(options, "paddock"),
        "spec": {"selector": {"matchLabels": labels()}, "podMetricsEndpoints": endpoints},
    }


def _default_pool(options: KubeOptions) -> list[Manifest]:
    meta = {"name": "base", "namespace": "default", "labels": labels()}
    return [
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "SandboxTemplate",
            "metadata": meta,
            "spec": {
                "image": options.default_image,
                "resources": {"cpu": "1", "memory": "1Gi"},
                "description": "What a sandbox is made of when nobody says otherwise.",
            },
        },
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "SandboxPool",
            "metadata": meta,
            "spec": {"templateRef": {"name": "base"}, "replicas": options.pool_size},
        },
    ]
