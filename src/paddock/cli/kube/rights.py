"""RBAC rules and service accounts of the roles on a cluster.

Each role has the fewest permissions it needs: gateways read Sandboxes, and only API replicas write
keys.
"""

from paddock.cli.kube.options import KubeOptions, Manifest, meta

GROUP = "paddock.dev"
READ = ("get", "list", "watch")


def _rule(group: str, resources: str, *verbs: str) -> Manifest:
    return {"apiGroups": [group], "resources": resources.split(), "verbs": [*verbs]}


CLUSTER_RULES: dict[str, list[Manifest]] = {
    "controllers": [
        _rule(
            GROUP,
            "sandboxes sandboxpools sandboxclaims checkpoints batchsandboxes sandboxenvs "
            "sandboxtemplates templatebuilds",
            *READ,
        ),
        _rule(GROUP, "sandboxes sandboxpools", "create", "update", "delete"),
        _rule(GROUP, "checkpoints batchsandboxes", "update", "delete"),
        _rule(GROUP, "sandboxclaims", "delete"),
        _rule(GROUP, "sandboxenvs", "create", "update"),
        _rule(
            GROUP,
            "sandboxes/status sandboxpools/status sandboxclaims/status checkpoints/status "
            "batchsandboxes/status sandboxenvs/status",
            "update",
        ),
        # Some clusters require this to set blockOwnerDeletion.
        _rule(
            GROUP,
            "sandboxpools/finalizers batchsandboxes/finalizers sandboxenvs/finalizers",
            "update",
        ),
        _rule("", "pods persistentvolumeclaims", *READ, "create", "patch", "delete"),
        _rule("", "pods/resize", "get", "patch"),
        _rule("networking.k8s.io", "networkpolicies", "get", "list", "create", "delete"),
        # Listed, because only events contain why a kubelet could not pull an image.
        _rule("", "events", "get", "list", "create", "patch"),
    ],
    "api": [
        _rule(
            GROUP,
            "sandboxes sandboxpools sandboxclaims checkpoints batchsandboxes sandboxenvs "
            "sandboxtemplates templatebuilds",
            *READ,
        ),
        _rule(GROUP, "sandboxes", "create", "update", "delete"),
        _rule(GROUP, "checkpoints", "create", "delete"),
        _rule(GROUP, "sandboxtemplates", "update", "delete"),
        # The leader reads the number of waiting claims of each replica from the environment.
        _rule(GROUP, "sandboxes/status sandboxenvs/status", "update"),
        # A killed sandbox may return to its pool, which then waits for it on deletion.
        _rule(GROUP, "sandboxpools/finalizers", "update"),
        _rule("", "pods/resize", "get", "patch"),
    ],
    "gateway": [_rule(GROUP, "sandboxes", *READ)],
}
"""Permissions of each role in all namespaces."""

OWN_RULES: dict[str, list[Manifest]] = {
    "controllers": [
        # Leader election, quota shares, and the removal of old idempotency keys.
        _rule("coordination.k8s.io", "leases", *READ, "create", "update", "delete"),
        _rule("", "secrets", *READ),
    ],
    "api": [
        _rule("", "secrets", *READ, "create", "patch", "delete"),
        # Quota shares and idempotency keys.
        _rule("coordination.k8s.io", "leases", *READ, "create", "update", "delete"),
    ],
}
"""Permissions of each role in Paddock's own namespace."""


def identity(options: KubeOptions, component: str) -> list[Manifest]:
    """Return the service account, roles and bindings of a role."""
    name = f"paddock-{component}"
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": options.namespace}
    objects: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": meta(options, name, component),
            "automountServiceAccountToken": component != "node",
        }
    ]
    for kind, rules in (("ClusterRole", CLUSTER_RULES), ("Role", OWN_RULES)):
        if component not in rules:
            continue
        metadata = meta(options, name, component)
        if kind == "ClusterRole":
            metadata.pop("namespace")
        objects += [
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
    return objects
