"""Discovery documents: groups, versions, resources and verbs. Pure.

Both forms are served: one document per version, for all clients, and the aggregated one, which
newer clients use to save round trips.
"""

from typing import Any

from paddock import __version__
from paddock.api.kube.scheme import (
    GROUP_VERSIONS,
    SCALE_KIND,
    SUBRESOURCE_VERBS,
    VERBS,
    categories,
    group_version,
    subresources,
)
from paddock.resources.registry import KindInfo

SPOKEN_MINOR = "33"
"""The minor version of Kubernetes whose conventions apply; clients choose features by it."""


def version() -> dict[str, str]:
    """Return the server version, as `kubectl version` prints it."""
    return {
        "major": "1",
        "minor": SPOKEN_MINOR,
        "gitVersion": f"v1.{SPOKEN_MINOR}.0+paddock.{__version__}",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "linux/amd64",
    }


def core_versions(server: str) -> dict[str, Any]:
    """Return `/api`."""
    return {
        "kind": "APIVersions",
        "versions": [item for group, item in GROUP_VERSIONS if not group],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": server}],
    }


def groups() -> dict[str, Any]:
    """Return `/apis`."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()}


def group(name: str) -> dict[str, Any] | None:
    """Return `/apis/<group>`, or None."""
    found = next((item for item in _groups() if item["name"] == name), None)
    return None if found is None else {"kind": "APIGroup", "apiVersion": "v1", **found}


def resources(name: str, at_version: str) -> dict[str, Any] | None:
    """Return the resources of one group version, or None."""
    kinds = GROUP_VERSIONS.get((name, at_version))
    if kinds is None:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{name}/{at_version}" if name else at_version,
        "resources": [entry for info in kinds for entry in _entries(info)],
    }


def aggregated(api_version: str, *, is_core: bool) -> dict[str, Any]:
    """Return `/api` or `/apis` with everything below it."""
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{api_version}",
        "metadata": {},
        "items": [
            {
                "metadata": {"name": name} if name else {},
                "versions": [
                    {
                        "version": at_version,
                        "freshness": "Current",
                        "resources": [_aggregated_entry(info) for info in kinds],
                    }
                ],
            }
            for (name, at_version), kinds in GROUP_VERSIONS.items()
            if (not name) is is_core
        ],
    }


def _groups() -> list[dict[str, Any]]:
    return [
        {"name": name, "versions": [version_entry], "preferredVersion": version_entry}
        for name, at_version in GROUP_VERSIONS
        if name
        for version_entry in [{"groupVersion": f"{name}/{at_version}", "version": at_version}]
    ]


def _entries(info: KindInfo) -> list[dict[str, Any]]:
    entry: dict[str, Any] = {
        "name": info.cls.PLURAL,
        "singularName": info.singular,
        "namespaced": info.cls.NAMESPACED,
        "kind": info.kind,
        "verbs": list(VERBS),
    }
    if info.short_names:
        entry["shortNames"] = list(info.short_names)
    if names := categories(info):
        entry["categories"] = list(names)
    return [entry, *(_sub_entry(info, name) for name in subresources(info))]


def _sub_entry(info: KindInfo, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": f"{info.cls.PLURAL}/{name}",
        "singularName": "",
        "namespaced": info.cls.NAMESPACED,
        "kind": info.kind,
        "verbs": list(SUBRESOURCE_VERBS),
    }
    return entry | SCALE_KIND if name == "scale" else entry


def _aggregated_entry(info: KindInfo) -> dict[str, Any]:
    name, at_version = group_version(info)
    kind = {"group": name, "version": at_version, "kind": info.kind}
    entry: dict[str, Any] = {
        "resource": info.cls.PLURAL,
        "responseKind": kind,
        "scope": "Namespaced" if info.cls.NAMESPACED else "Cluster",
        "singularResource": info.singular,
        "verbs": list(VERBS),
    }
    if info.short_names:
        entry["shortNames"] = list(info.short_names)
    if names := categories(info):
        entry["categories"] = list(names)
    if parts := subresources(info):
        entry["subresources"] = [
            {
                "subresource": part,
                "responseKind": SCALE_KIND if part == "scale" else kind,
                "verbs": list(SUBRESOURCE_VERBS),
            }
            for part in parts
        ]
    return entry
