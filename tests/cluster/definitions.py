"""Install the CRDs on a test cluster: those of deploy/crds, or bare ones if there are none.

A bare CRD has the names of the kind, a status subresource and no schema.
"""

import json
import time
from typing import Any

import yaml

from paddock.resources.registry import KINDS, KindInfo
from tests.cluster.binaries import ROOT
from tests.cluster.info import ClusterInfo, RefusedError

_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
READY_SECONDS = 90.0


def definitions() -> list[dict[str, Any]]:
    """Return one CRD per kind."""
    shipped: dict[str, dict[str, Any]] = {}
    for path in sorted((ROOT / "deploy" / "crds").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("kind") == "CustomResourceDefinition":
                shipped[document["spec"]["names"]["kind"]] = document
    return [shipped.get(info.kind) or _bare(info) for info in KINDS]


def _bare(info: KindInfo) -> dict[str, Any]:
    group, version = info.cls.API_VERSION.split("/")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{info.cls.PLURAL}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced" if info.cls.NAMESPACED else "Cluster",
            "names": {
                "kind": info.kind,
                "plural": info.cls.PLURAL,
                "singular": info.singular,
                "shortNames": list(info.short_names),
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {"spec": anything, "status": anything},
                        }
                    },
                }
            ],
        },
    }


def install(info: ClusterInfo) -> None:
    """Create or replace the CRDs; wait until the server serves all of them."""
    wanted = definitions()
    for definition in wanted:
        _put(info, definition)
    deadline = time.monotonic() + READY_SECONDS
    for definition in wanted:
        spec = definition["spec"]
        group = f"/apis/{spec['group']}/{spec['versions'][0]['name']}"
        plural = spec["names"]["plural"]
        while not (_served(info, f"{group}/{plural}") and _discovered(info, group, plural)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{plural} is not served: {_conditions(info, definition)}")
            time.sleep(0.05)


def _put(info: ClusterInfo, definition: dict[str, Any]) -> None:
    path = f"{_PATH}/{definition['metadata']['name']}"
    try:
        info.request("POST", _PATH, definition)
    except RefusedError as error:
        if error.code != 409:
            raise
        while not _replaced(info, path, definition):
            pass  # the server wrote its status in between


def _replaced(info: ClusterInfo, path: str, definition: dict[str, Any]) -> bool:
    version = info.request("GET", path)["metadata"]["resourceVersion"]
    metadata = {**definition["metadata"], "resourceVersion": version}
    try:
        info.request("PUT", path, {**definition, "metadata": metadata})
    except RefusedError as error:
        if error.code != 409:
            raise
        return False
    return True


def _served(info: ClusterInfo, path: str) -> bool:
    try:
        info.request("GET", path + "?limit=1")
    except RefusedError as error:
        if error.code not in (404, 429, 503):
            raise
        return False
    return True


def _discovered(info: ClusterInfo, group: str, plural: str) -> bool:
    """Whether discovery lists the kind; it does so later than the kind is served."""
    try:
        found = info.request("GET", group)
    except RefusedError as error:
        if error.code not in (404, 429, 503):
            raise
        return False
    return any(item["name"] == plural for item in found["resources"])


def _conditions(info: ClusterInfo, definition: dict[str, Any]) -> str:
    found = info.request("GET", f"{_PATH}/{definition['metadata']['name']}")
    return json.dumps(found.get("status", {}).get("conditions"))
