"""What each role may do on a cluster, and the accounts by which it may.

Rights are the least each role works with: gateways read Sandboxes, and nobody but the API's
replicas writes keys.
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
            "sandboxtemplates",
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
        # Some clusters ask for this of whoever makes what its owner's deletion waits for.
        _rule(
            GROUP,
            "sandboxpools/finalizers batchsandboxes/finalizers sandboxenvs/finalizers",
            "update",
        ),
        _rule("", "pods persistentvolumeclaims", *READ, "create", "patch", "delete"),
        _rule("", "pods/resize", "get", "patch"),
        _rule("networking.k8s.io", "networkpolicies", "get", "list", "create", "delete"),
        # Listed, because they alone say why a kubelet could not have an image.
        _rule("", "events", "get", "list", "create", "patch"),
    ],
    "api": [
        _rule(
            GROUP,
            "sandboxes sandboxpools sandboxclaims checkpoints batchsandboxes sandboxenvs "
            "sandboxtemplates",
            *READ,
        ),
        _rule(GROUP, "sandboxes", "create", "update", "delete"),
        _rule(GROUP, "checkpoints", "create", "delete"),
        _rule(GROUP, "sandboxtemplates", "update", "delete"),
        # Whoever leads reads of an environment how many claims wait with each replica.
        _rule(GROUP, "sandboxes/status sandboxenvs/status", "update"),
        # What is killed may go back to its pool, whose deletion waits for it again then.
        _rule(GROUP, "sandboxpools/finalizers", "update"),
        _rule("", "pods/resize", "get", "patch"),
    ],
    "gateway": [_rule(GROUP, "sandboxes", *READ)],
}
"""What each role may do everywhere."""

OWN_RULES: dict[str, list[Manifest]] = {
    "controllers": [
        # Who leads, shares of quotas, and the sweeping of old idempotency keys.
        _rule("coordination.k8s.io", "leases", *READ, "create", "update", "delete"),
        _rule("", "secrets", *READ),
    ],
    "api": [
        _rule("", "secrets", *READ, "create", "patch", "delete"),
        # Shares of quotas, and who is first with an idempotency key.
        _rule("coordination.k8s.io", "leases", *READ, "create", "update", "delete"),
    ],
}
"""What each role may do in Paddock's own namespace."""


def identity(options: KubeOptions, component: str) -> list[Manifest]:
    """Give a role's account and what ties it to its rights."""
    name = f"paddock-{component}"
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": options.namespace}
    made: list[Manifest] = [
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
