"""Users and rights of a test cluster, mostly by bearer token.

admin        everything, as a member of system:masters
certificate  the same, by a client certificate instead of a token
reader       reads Paddock's and built-in kinds in every namespace, writes nothing
tenant       has all rights in the namespace `tenant`, and none elsewhere
nobody       is authenticated and has no rights
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
    """Write the API server's token file."""
    path = directory / "tokens.csv"
    groups = {"admin": ',"system:masters"'}
    path.write_text(
        "".join(f"{token},{user},{user}{groups.get(user, '')}\n" for user, token in TOKENS.items())
    )
    path.chmod(0o600)
    return path


def access_rules() -> list[tuple[str, dict[str, Any]]]:
    """Return the RBAC objects of the users, with the paths to post them to."""
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
