"""A real API server accepts the CRDs and rejects the same fields as Paddock."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddock.resources.registry import info_for
from tests.cluster.control_plane import ClusterInfo, RefusedError
from tests.resources.bad_objects import BAD, BAD_CHANGES, Bad, BadChange

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def collection(kind: str, namespace: str) -> str:
    return f"/apis/paddock.dev/v1alpha1/namespaces/{namespace}/{info_for(kind).cls.PLURAL}"


def refused_fields(caught: pytest.ExceptionInfo[RefusedError]) -> set[str]:
    status = json.loads(str(caught.value).partition(": ")[2])
    assert caught.value.code in (400, 422), status
    causes = status.get("details", {}).get("causes", [])
    # The server writes map keys in brackets for CEL rules, and dotted elsewhere.
    return {re.sub(r"\[([a-z][^\]]*)\]", r".\1", cause.get("field", "")) for cause in causes}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_server_accepts_every_example(
    kube_cluster: ClusterInfo, kube_namespace: str, path: Path
):
    for document in yaml.safe_load_all(path.read_text()):
        where = collection(document["kind"], kube_namespace) + "?fieldValidation=Strict"
        made = kube_cluster.request("POST", where, document)
        assert made["spec"].items() >= document["spec"].items()


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.by_server], ids=lambda bad: f"{bad.kind}: {bad.why}"
)
def test_the_server_rejects_what_paddock_rejects(kube_cluster: ClusterInfo, bad: Bad):
    with pytest.raises(RefusedError) as caught:
        kube_cluster.request("POST", collection(bad.kind, "default"), bad.document)
    assert bad.path in refused_fields(caught)


@pytest.mark.parametrize("bad", BAD_CHANGES, ids=lambda bad: f"{bad.kind}: {bad.why}")
def test_the_server_enforces_immutable_fields(
    kube_cluster: ClusterInfo, kube_namespace: str, bad: BadChange
):
    where = collection(bad.kind, kube_namespace)
    document: dict[str, Any] = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": bad.kind,
        "metadata": {"name": "x"},
        "spec": bad.before,
    }
    made = kube_cluster.request("POST", where, document)
    with pytest.raises(RefusedError) as caught:
        kube_cluster.request("PUT", f"{where}/x", {**made, "spec": bad.after})
    assert refused_fields(caught) == {bad.path}


def test_a_pool_is_scaled_by_its_scale_subresource(kube_cluster: ClusterInfo, kube_namespace: str):
    where = collection("SandboxPool", kube_namespace)
    pool = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxPool",
        "metadata": {"name": "p"},
        "spec": {"templateRef": {"name": "t"}, "replicas": 1},
    }
    kube_cluster.request("POST", where, pool)
    scale = kube_cluster.request("GET", f"{where}/p/scale")
    assert scale["spec"]["replicas"] == 1
    scale["spec"]["replicas"] = 5
    kube_cluster.request("PUT", f"{where}/p/scale", scale)
    assert kube_cluster.request("GET", f"{where}/p")["spec"]["replicas"] == 5


def test_sandboxes_are_selected_by_public_id(kube_cluster: ClusterInfo, kube_namespace: str):
    where = collection("Sandbox", kube_namespace)
    for name in ("one", "two"):
        claim = {
            "sandboxId": name,
            "owner": "team",
            "lock": "l",
            "claimTime": "2030-01-01T00:00:00Z",
        }
        kube_cluster.request(
            "POST",
            where,
            {
                "apiVersion": "paddock.dev/v1alpha1",
                "kind": "Sandbox",
                "metadata": {"name": f"sandbox-{name}"},
                "spec": {"restoreFrom": "c", "claim": claim},
            },
        )
    found = kube_cluster.request("GET", f"{where}?fieldSelector=spec.claim.sandboxId%3Dtwo")
    assert [item["metadata"]["name"] for item in found["items"]] == ["sandbox-two"]
