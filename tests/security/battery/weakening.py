"""Attempts to weaken limits by the declarative API: the fields, and the kinds of requests."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

METADATA: Sequence[tuple[str, Any]] = (
    ("metadata/finalizers", ["paddock.dev/mine"]),
    ("metadata/ownerReferences", [
        {"apiVersion": "v1", "kind": "Namespace", "name": "blue", "uid": "u"}]),
    ("metadata/labels", {"paddock.dev/pool": "base", "paddock.dev/team": "blue"}),
    ("metadata/annotations", {"paddock.dev/key-id": "other"}),
    ("metadata/annotations", {"paddock.dev/field-managers": "{}"}),
    ("status", {"phase": "Running", "claimedReplicas": 7, "replicas": 7}),
)  # fmt: skip
TEMPLATE: Sequence[tuple[str, Any]] = (
    ("volumes", [{"name": "v", "mountPath": "/v", "hostPath": "/etc"}]),
    ("volumes", [{"name": "v", "mountPath": "/v", "claimName": "data"}]),
    ("podTemplate", {"spec": {"hostNetwork": True}}),
    ("volumeClaimTemplates", [{"metadata": {"name": "v"}}]),
    ("outbound", {"httpProxy": "http://10.0.0.1:3128"}),
    ("restoreFrom", "snapother"),
    ("image", "docker.io/library/alpine"),
    ("network", {"allowPrivateNetworks": True}),
    ("network", {"allowOut": ["10.0.0.0/8"]}),
    ("network", {"allowOut": ["169.254.169.254"]}),
    ("network", {"allowOut": ["example.com"]}),
    ("network", {"dnsServers": ["10.0.0.53"]}),
    ("resources", {"cpu": "64"}),
    ("resources", {"memory": "1Ti"}),
    ("resources", {"disk": "1Ti"}),
    ("resources", {"pids": 1_000_000}),
)
FAR = "2099-01-01T00:00:00Z"
KINDS: Mapping[str, Sequence[tuple[str, Any]]] = {
    "sandboxclaims": (
        ("spec/shutdownTime", FAR),
        ("spec/replicas", 50),
        ("spec/templateName", "other"),
        ("spec/labels", {"paddock.dev/pool": "base"}),
        ("spec/annotations", {"paddock.dev/after-failures": "0"}),
        ("spec/inplaceUpdate", {"image": "docker.io/library/alpine"}),
    ),
    "sandboxtemplates": (
        ("spec/public", True),
        *((f"spec/{field}", value) for field, value in TEMPLATE),
    ),
    "sandboxpools": (
        ("spec/replicas", 50),
        ("spec/templateRef", {"name": "t"}),
        ("spec/maxIdleAgeSeconds", 1),
        ("spec/labels", {"paddock.dev/team": "blue"}),
        *((f"spec/template/{field}", value) for field, value in TEMPLATE),
    ),
    "batchsandboxes": (
        ("spec/replicas", 50),
        ("spec/poolRef", "*"),
        ("spec/owner", "blue"),
        ("spec/expireTime", FAR),
        ("spec/shardPatches", [{"volumes": []}]),
        *((f"spec/template/{field}", value) for field, value in TEMPLATE),
    ),
    "checkpoints": (
        ("spec/owner", "blue"),
        ("spec/keyId", "other"),
        ("spec/sandboxName", "other"),
        ("spec/sandboxUid", "other"),
        ("spec/sandboxId", "other"),
        ("spec/checkpointId", "snapother"),
        ("spec/ttlSecondsAfterFinished", 1),
        ("spec/names", ["blue/name:default"]),
    ),
    "sandboxes": (
        ("spec/claim/owner", "blue"),
        ("spec/claim/keyId", "other"),
        ("spec/claim/lock", "other"),
        ("spec/claim/networkOpened", True),
        ("spec/claim/timeoutSeconds", None),
        ("spec/claim", None),
        ("spec/network", {"allowPrivateNetworks": True}),
        ("spec/resources", {"memory": "1Ti"}),
        ("spec/image", "docker.io/library/alpine"),
        ("spec/restoreFrom", "snapother"),
        ("spec/recycle", True),
        ("spec/shutdownTime", FAR),
        ("spec/shutdownTime", None),
        ("spec/pauseTime", FAR),
        ("spec/pausedRetentionSeconds", 31_000_000),
        ("spec/idlePause", {"afterSeconds": 1}),
        ("spec/wakeOnTraffic", {"enabled": True, "timeoutSeconds": 1_000_000}),
        *((f"spec/template/{field}", value) for field, value in TEMPLATE),
    ),
}
"""By kind: the path of a field, and what it must never become."""
WAYS = ("merge", "strategic", "json", "apply", "replace")


class Attempt(NamedTuple):
    """One request that must leave the object as it is."""

    kind: str
    path: str
    value: Any
    way: str


def attempts() -> Iterator[Attempt]:
    """Yield every field of every kind by every kind of request."""
    for kind, fields in KINDS.items():
        for path, value in (*METADATA, *fields):
            for way in WAYS:
                yield Attempt(kind, path, value, way)


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return a document with one field."""
    document: Any = value
    for part in reversed(path.split("/")):
        document = {part: document}
    return document


def merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the fields of another one set; lists and values are replaced."""
    result = dict(document)
    for name, value in changes.items():
        old = result.get(name)
        is_deep = isinstance(value, dict) and isinstance(old, dict)
        result[name] = merged(old, value) if is_deep else value
    return result
