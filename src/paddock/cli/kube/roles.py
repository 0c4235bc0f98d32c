"""The pods of each role: settings, probes, resources and security contexts."""

from paddock.cli.kube.options import KubeOptions, Manifest, labels, meta
from paddock.cli.kube.tls import TLS_ENVIRONMENT, tls_container, tls_volumes
from paddock.cli.kube.webhook import WEBHOOK_CONTAINER, WEBHOOK_VOLUME


def _environment(options: KubeOptions, component: str) -> list[Manifest]:
    def from_secret(name: str, key: str, *, is_optional: bool = False) -> Manifest:
        reference: Manifest = {"name": options.secret, "key": key}
        if is_optional:
            reference["optional"] = True
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}

    inside = f"{options.namespace}.svc"
    values = {
        "PADDOCK_STORE": "kubernetes",
        "PADDOCK_RUNTIME": "kubernetes",
        "PADDOCK_AGENT_IMAGE": options.image,
        "PADDOCK_SYSTEM_NAMESPACE": options.namespace,
        "PADDOCK_STATE_DIR": "/tmp",  # noqa: S108 - of the pod
        "PADDOCK_LOG_JSON": "true",
        "PADDOCK_API_HOST": f"paddock-api.{inside}" if component == "gateway" else "0.0.0.0",  # noqa: S104
        "PADDOCK_API_PORT": "3001",
    }
    if component == "api":
        values["PADDOCK_API_PEERS"] = f"dns:paddock-api-replicas.{inside}:3001"
        values["PADDOCK_AUDIT_LOG"] = "stdout"
    if component in ("gateway", "controllers"):
        # Gateways exchange routes; the leader polls them for the traffic of sandboxes.
        values["PADDOCK_PEERS"] = f"dns:paddock-gateway-peers.{inside}:3002"
    if component == "gateway":
        values |= {
            "PADDOCK_HOST": "0.0.0.0",  # noqa: S104 - inside a pod
            "PADDOCK_PORT": "3000",
            "PADDOCK_ADMIN_PORT": "3002",
        }
    found: list[Manifest] = [{"name": name, "value": text} for name, text in values.items()]
    if component == "gateway":
        # The gateway reports this address to the API and to its peers.
        own = {"fieldRef": {"fieldPath": "status.podIP"}}
        found.append({"name": "PADDOCK_ADMIN_HOST", "valueFrom": own})
    found += [
        from_secret("PADDOCK_SEED", "seed"),
        from_secret("PADDOCK_ACCEPTED_SEEDS", "accepted-seeds", is_optional=True),
        from_secret("PADDOCK_TOKEN", "token"),
    ]
    if component == "api":
        found.append(from_secret("PADDOCK_API_KEY", "api-key"))
    return found


_PORTS = {
    "controllers": [("http", 3001)],
    "api": [("http", 3001)],
    "gateway": [("traffic", 3000), ("admin", 3002)],
    "node": [("orders", 49985)],
}
PROBED = {"controllers": 3001, "api": 3001, "gateway": 3002, "node": 49985}
_BEHIND_SERVICES = ("api", "gateway")
_PRE_STOP_SECONDS = 5
"""A terminating pod still gets connections until all nodes have updated their endpoints."""
_REQUESTS = {
    "controllers": {"cpu": "200m", "memory": "256Mi"},
    "api": {"cpu": "200m", "memory": "256Mi"},
    "gateway": {"cpu": "100m", "memory": "128Mi"},
    "node": {"cpu": "10m", "memory": "64Mi"},
}


def _container(options: KubeOptions, component: str) -> Manifest:
    probed = PROBED[component]
    ready = "/healthz" if component == "node" else "/readyz"
    container: Manifest = {
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
    if component in _BEHIND_SERVICES:
        sleep = {"command": ["sleep", str(_PRE_STOP_SECONDS)]}
        container["lifecycle"] = {"preStop": {"exec": sleep}}
    return container


def deployment(options: KubeOptions, component: str) -> Manifest:
    """Return the Deployment of a role."""
    # Service links would set variables such as PADDOCK_PORT, which are settings.
    selector = labels(component)
    container = _container(options, component)
    containers = [container]
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}]
    if component == "gateway" and options.tls_secret:
        container["env"] += TLS_ENVIRONMENT
        containers.append(tls_container(options))
        volumes += tls_volumes(options)
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
        "metadata": meta(options, f"paddock-{component}", component),
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
                    "containers": containers,
                    "volumes": volumes,
                },
            },
        },
    }


def node_agent(options: KubeOptions) -> Manifest:
    """Return the DaemonSet of the agents that freeze pods."""
    container = _container(options, "node")
    container["securityContext"] = {
        # The agent writes to the cgroup files of the host, which belong to root.
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
        "metadata": meta(options, "paddock-node", "node"),
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


def budget(options: KubeOptions, component: str) -> Manifest:
    """Return a budget that allows one unavailable replica."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(options, f"paddock-{component}", component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(component)}},
    }
