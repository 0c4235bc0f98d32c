"""Groups, kinds, verbs and paths of the declarative API. Pure."""

from typing import Any

from msgspec import Struct

from paddock.resources.meta import Key
from paddock.resources.registry import ALL, KindInfo

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
SUBRESOURCE_VERBS = ("get", "patch", "update")
SCALE_KIND = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
_WORKLOADS = {"Sandbox", "SandboxPool", "SandboxClaim", "BatchSandbox", "SandboxEnv"}
"""Kinds in the category `all`, for `kubectl get all`: workloads, not stored data."""


class ResourceTarget(Struct, frozen=True):
    """The kind, object or subresource that a path names."""

    info: KindInfo
    namespace: str | None = None
    """None: all namespaces, or a cluster-scoped kind."""
    name: str | None = None
    subresource: str | None = None

    @property
    def key(self) -> Key:
        """The key of the named object."""
        return Key(self.namespace or "", self.name or "")


def group_version(info: KindInfo) -> tuple[str, str]:
    """Return group and version; the core group is empty."""
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
    """Return the path prefix of a group version."""
    return f"/apis/{group}/{version}" if group else f"/api/{version}"


def categories(info: KindInfo) -> tuple[str, ...]:
    """Return the categories of a kind."""
    return (*info.categories, "all") if info.kind in _WORKLOADS else info.categories


def subresources(info: KindInfo) -> tuple[str, ...]:
    """Return the subresources of a kind."""
    found = ("status",) if info.has_status else ()
    return (*found, "scale") if info.scale else found


def parse_path(path: str) -> ResourceTarget | None:
    """Return the target of a path; None if the path is invalid."""
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
    """Return group, version and kind, as in OpenAPI extensions."""
    group, version = group_version(info)
    return {"group": group, "version": version, "kind": info.kind}
