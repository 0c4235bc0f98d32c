"""The pods of each role: settings, probes, what they ask of a node and what they may do there."""

from paddock.cli.kube.options import KubeOptions, Manifest, labels, meta
from paddock.cli.kube.webhook import WEBHOOK_CONTAINER, WEBHOOK_VOLUME


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
PROBED = {"controllers": 3001, "api": 3001, "gateway": 3002, "node": 49985}
_BEHIND_SERVICES = ("api", "gateway")
_STAYS_SECONDS = 5
"""A pod that is to end is still sent connections until every node has heard of it."""
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
        stay = {"command": ["sleep", str(_STAYS_SECONDS)]}
        container["lifecycle"] = {"preStop": {"exec": stay}}
    return container


def deployment(options: KubeOptions, component: str) -> Manifest:
    """Give the replicas of a role."""
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
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }


def node_agent(options: KubeOptions) -> Manifest:
    """Give the agents that freeze pods, one per node."""
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
    """Let a cluster take one replica at a time away."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(options, f"paddock-{component}", component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(component)}},
    }
