"""Objects that tests send."""

from typing import Any

ROOT = "/apis/paddock.dev/v1alpha1"
POOLS = f"{ROOT}/namespaces/default/sandboxpools"
SANDBOXES = f"{ROOT}/namespaces/default/sandboxes"
CLAIMS = f"{ROOT}/namespaces/default/sandboxclaims"
EVENTS = "/api/v1/namespaces/default/events"


def pool(name: str = "p", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxPool",
        "metadata": {"name": name},
        "spec": {"templateRef": {"name": "t"}, "replicas": 1} | spec,
    }


def sandbox(name: str = "s", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "Sandbox",
        "metadata": {"name": name} | metadata,
        "spec": {"templateRef": {"name": "t"}},
    }
