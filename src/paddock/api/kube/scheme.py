"""What is served where: groups, kinds, verbs, and what a path names. Pure."""

from typing import Any

from msgspec import Struct

from paddock.resources.meta import Key
from paddock.resources.registry import ALL, KindInfo

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
SUBRESOURCE_VERBS = ("get", "patch", "update")
SCALE_KIND = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
_WORKLOADS = {"Sandbox", "SandboxPool", "SandboxClaim", "BatchSandbox", "SandboxEnv"}
"""What `kubectl get all` shows, and `kubectl delete all` takes: what runs, not what is kept."""


class ResourceTarget(Struct, frozen=True):
    """What a request is about."""

    info: KindInfo
    namespace: str | None = None
    """`None`: all of them, or the kind has none."""
    name: str | None = None
    subresource: str | None = None

    @property
    def key(self) -> Key:
        """Where the named object is."""
        return Key(self.namespace or "", self.name or "")


def group_version(info: KindInfo) -> tuple[str, str]:
    """Give group and version; the group of Kubernetes' first kinds is empty."""
    group, _, version = info.cls.API_VERSION.rpartition("/")
    return group, version


def _by_version() -> dict[tuple[str, str], tuple[KindInfo, ...]]:
    found: dict[tuple[str, str], tuple[KindInfo, ...]] = {}
    for info in ALL:
        key = group_version(info)
        found[key] = (*found.get(key, ()), info)
    return found


GROUP_VERSIONS = _by_version()
"""Kinds by group and version."""


def base_path(group: str, version: str) -> str:
    """Give the path below which a version's resources are."""
    return f"/apis/{group}/{version}" if group else f"/api/{version}"


def categories(info: KindInfo) -> tuple[str, ...]:
    """Name the groups of kinds under which people ask for this one."""
    return (*info.categories, "all") if info.kind in _WORKLOADS else info.categories


def subresources(info: KindInfo) -> tuple[str, ...]:
    """Name the parts of an object that are written on their own."""
    found = ("status",) if info.has_status else ()
    return (*found, "scale") if info.scale else found


def parse_path(path: str) -> ResourceTarget | None:
    """Find out what a path names; `None` where nothing can be there."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        kinds, rest = GROUP_VERSIONS.get(("", parts[1])), parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        kinds, rest = GROUP_VERSIONS.get((parts[1], parts[2])), parts[3:]
    else:
        return None
    if kinds is None or "" in rest:
        return None
    return _resolve({info.cls.PLURAL: info for info in kinds}, rest)


def _resolve(kinds: dict[str, KindInfo], rest: list[str]) -> ResourceTarget | None:
    namespace: str | None = None
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] in kinds:
        namespace, rest = rest[1], rest[2:]
    info = kinds.get(rest[0])
    if info is None or len(rest) > 3:
        return None
    name, subresource = (*rest[1:], None, None)[:2]
    needs_namespace = info.cls.NAMESPACED and name is not None
    if (namespace is not None and not info.cls.NAMESPACED) or (needs_namespace and not namespace):
        return None
    if subresource is not None and subresource not in subresources(info):
        return None
    return ResourceTarget(info, namespace, name, subresource)


def kind_reference(info: KindInfo) -> dict[str, Any]:
    """Give group, version and kind as clients expect them beside schemas and operations."""
    group, version = group_version(info)
    return {"group": group, "version": version, "kind": info.kind}
