"""Who may do what in a test cluster, mostly by bearer token.

admin        everything, as a member of system:masters
certificate  the same, by a client certificate in place of a token
reader       reads our kinds and the built-in ones in every namespace, writes nothing
tenant       works freely in the namespace `tenant`, and sees nothing of any other
nobody       is known to the API server and has been granted nothing
"""

from pathlib import Path
from typing import Any

TENANT_NAMESPACE = "tenant"
TOKENS = {
    "admin": "admin-token",
    "reader": "reader-token",
    "tenant": "tenant-token",
    "nobody": "nobody-token",
}
_RBAC = "rbac.authorization.k8s.io"


def token_file(directory: Path) -> Path:
    """Write the API server's list of tokens."""
    path = directory / "tokens.csv"
    groups = {"admin": ',"system:masters"'}
    path.write_text(
        "".join(f"{token},{user},{user}{groups.get(user, '')}\n" for user, token in TOKENS.items())
    )
    path.chmod(0o600)
    return path


def access_rules() -> list[tuple[str, dict[str, Any]]]:
    """Give what has to be posted, and where, before the users above can do as said."""
    reads = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]}
    works = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    base = f"/apis/{_RBAC}/v1"
    in_tenant = f"{base}/namespaces/{TENANT_NAMESPACE}"
    return [
        ("/api/v1/namespaces", {"metadata": {"name": TENANT_NAMESPACE}}),
        (f"{base}/clusterroles", _role("ClusterRole", "test-reader", reads)),
        (f"{base}/clusterrolebindings", _binding("ClusterRoleBinding", "reader", "ClusterRole")),
        (f"{in_tenant}/roles", _role("Role", "test-tenant", works)),
        (f"{in_tenant}/rolebindings", _binding("RoleBinding", "tenant", "Role")),
    ]


def _role(kind: str, name: str, rule: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}, "rules": [rule]}


def _binding(kind: str, user: str, role_kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "metadata": {"name": f"test-{user}"},
        "subjects": [{"kind": "User", "name": user, "apiGroup": _RBAC}],
        "roleRef": {"kind": role_kind, "name": f"test-{user}", "apiGroup": _RBAC},
    }
