"""Get, list, tables and discovery, as Kubernetes clients expect them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from paddock.api.kube.scheme import parse_path
from paddock.api.kube.tables import age
from paddock.resources.registry import KINDS
from tests.api.kube.objects import POOLS, ROOT, SANDBOXES, pool, sandbox

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


async def made(client: httpx.AsyncClient, path: str, document: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=document)
    assert response.status_code == 201, response.text
    return response.json()


async def test_a_created_object_is_returned_with_its_defaults(client: httpx.AsyncClient):
    await made(client, POOLS, pool(updateStrategy={"paused": True}))
    found = (await client.get(f"{POOLS}/p")).json()
    assert found["kind"] == "SandboxPool"
    assert found["metadata"]["generation"] == 1
    assert found["metadata"]["uid"]
    assert found["spec"]["updateStrategy"] == {"maxUnavailable": "20%", "paused": True}
    assert found["spec"]["recycleStrategy"]["type"] == "Delete"
    assert found["status"]["available"] == 0
    assert "capacity" not in found["spec"]


async def test_all_pages_of_a_list_have_one_version(client: httpx.AsyncClient):
    for index in range(5):
        await made(client, SANDBOXES, sandbox(f"s{index}"))
    names, token, versions = [], "", set()
    while True:
        response = await client.get(SANDBOXES, params={"limit": 2, "continue": token})
        page = response.json()
        names += [item["metadata"]["name"] for item in page["items"]]
        versions.add(page["metadata"]["resourceVersion"])
        token = page["metadata"].get("continue", "")
        if not token:
            break
        assert page["metadata"]["remainingItemCount"] == 5 - len(names)
    assert names == [f"s{index}" for index in range(5)]
    assert len(versions) == 1
    assert page["kind"] == "SandboxList"


async def test_a_list_of_an_exact_version_is_returned_or_refused(client: httpx.AsyncClient):
    await made(client, SANDBOXES, sandbox("a"))
    version = (await client.get(SANDBOXES)).json()["metadata"]["resourceVersion"]
    params = {"resourceVersion": version, "resourceVersionMatch": "Exact"}
    assert (await client.get(SANDBOXES, params=params)).status_code == 200
    await made(client, SANDBOXES, sandbox("b"))
    gone = await client.get(SANDBOXES, params=params)
    assert (gone.status_code, gone.json()["reason"]) == (410, "Expired")
    newer = params | {"resourceVersionMatch": "NotOlderThan"}
    assert len((await client.get(SANDBOXES, params=newer)).json()["items"]) == 2


async def test_selectors_filter_lists(client: httpx.AsyncClient):
    await made(client, SANDBOXES, sandbox("a", labels={"tier": "web"}))
    await made(client, SANDBOXES, sandbox("b", labels={"tier": "db"}))

    async def names(**params: str) -> list[str]:
        response = await client.get(f"{ROOT}/sandboxes", params=params)
        return [item["metadata"]["name"] for item in response.json()["items"]]

    assert await names(labelSelector="tier in (web,x)") == ["a"]
    assert await names(labelSelector="tier!=web") == ["b"]
    assert await names(fieldSelector="metadata.name=b") == ["b"]
    assert await names(fieldSelector="status.phase=Pending,metadata.namespace=default") == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"labelSelector": "a b c"}, "labelSelector"),
        ({"fieldSelector": "spec.nothing=1"}, "fieldSelector"),
        ({"fieldSelector": "nonsense"}, "fieldSelector"),
        ({"limit": "many"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"continue": "%%%"}, "continue"),
        ({"resourceVersionMatch": "Sometimes"}, "resourceVersionMatch"),
        ({"resourceVersionMatch": "Exact"}, "resourceVersionMatch"),
        ({"watch": "true", "resourceVersion": "x"}, "resourceVersion"),
        ({"watch": "true", "sendInitialEvents": "true"}, "sendInitialEvents"),
        ({"watch": "true", "timeoutSeconds": "x"}, "timeoutSeconds"),
    ],
)
async def test_invalid_options_are_refused_by_name(
    client: httpx.AsyncClient, params: dict[str, str], field: str
):
    response = await client.get(SANDBOXES, params=params)
    status = response.json() if response.status_code >= 400 else response.json()["object"]
    assert status["kind"] == "Status"
    assert status["code"] in (400, 422)
    assert status["details"]["causes"][0]["field"] == field


async def test_a_table_has_the_columns_of_its_kind(client: httpx.AsyncClient):
    await made(client, POOLS, pool())
    response = await client.get(POOLS, headers={"Accept": TABLE})
    table = response.json()
    assert table["kind"] == "Table"
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names[:6] == ["Name", "Desired", "Available", "Creating", "Allocated", "Age"]
    row = table["rows"][0]
    assert row["cells"][:5] == ["p", 0, 0, 0, 0]
    assert row["object"]["kind"] == "PartialObjectMetadata"
    assert row["object"]["metadata"]["name"] == "p"

    whole = (
        await client.get(POOLS, headers={"Accept": TABLE}, params={"includeObject": "Object"})
    ).json()
    assert whole["rows"][0]["object"]["kind"] == "SandboxPool"


async def test_metadata_only_lists_are_supported(client: httpx.AsyncClient):
    await made(client, POOLS, pool())
    accept = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
    found = (await client.get(POOLS, headers=accept)).json()
    assert found["kind"] == "PartialObjectMetadataList"
    assert set(found["items"][0]) == {"kind", "apiVersion", "metadata"}


async def test_unsupported_formats_are_not_acceptable(client: httpx.AsyncClient):
    response = await client.get(POOLS, headers={"Accept": "application/cbor"})
    assert response.status_code == 406
    assert response.json()["reason"] == "NotAcceptable"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/api/v2",
        "/apis/example.com",
        "/apis/paddock.dev/v9",
        f"{ROOT}/dinosaurs",
        f"{ROOT}/namespaces/default/dinosaurs/rex",
        f"{ROOT}/sandboxes/without-namespace",
        f"{SANDBOXES}/a/logs",
        f"{SANDBOXES}/a%2Fstatus",
        f"{SANDBOXES}/a/status/b",
        "/openapi/v3/apis/example.com/v1",
    ],
)
async def test_unknown_paths_return_a_404_status(client: httpx.AsyncClient, path: str):
    response = await client.get(path)
    assert response.status_code == 404
    assert response.json()["kind"] == "Status"
    assert response.json()["reason"] == "NotFound"


async def test_a_missing_object_has_the_message_that_scripts_match(
    client: httpx.AsyncClient,
):
    status = (await client.get(f"{SANDBOXES}/x")).json()
    assert status["message"] == 'sandboxes.paddock.dev "x" not found'
    assert status["details"] == {"name": "x", "kind": "sandboxes", "group": "paddock.dev"}


async def test_discovery_lists_every_kind_with_its_verbs(client: httpx.AsyncClient):
    groups = (await client.get("/apis")).json()["groups"]
    assert {group["name"] for group in groups} == {"paddock.dev", "coordination.k8s.io"}
    entries = {item["name"]: item for item in (await client.get(ROOT)).json()["resources"]}
    for info in KINDS:
        assert entries[info.cls.PLURAL]["shortNames"] == list(info.short_names)
        assert f"{info.cls.PLURAL}/status" in entries
    assert entries["sandboxpools/scale"]["kind"] == "Scale"
    assert (await client.get("/apis/paddock.dev")).json()["kind"] == "APIGroup"
    assert (await client.get("/api")).json()["versions"] == ["v1"]


@pytest.mark.parametrize("version", ["v2", "v2beta1"])
async def test_aggregated_discovery_is_supported(client: httpx.AsyncClient, version: str):
    kind = f"application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList"
    response = await client.get("/apis", headers={"Accept": f"{kind},application/json"})
    assert response.headers["content-type"] == kind
    items = {item["metadata"]["name"]: item for item in response.json()["items"]}
    resources = items["paddock.dev"]["versions"][0]["resources"]
    assert {item["resource"] for item in resources} == {info.cls.PLURAL for info in KINDS}


async def test_openapi_has_a_schema_for_every_kind(client: httpx.AsyncClient):
    index = (await client.get("/openapi/v3")).json()["paths"]
    url = index["apis/paddock.dev/v1alpha1"]["serverRelativeURL"]
    response = await client.get(url)
    schemas = response.json()["components"]["schemas"]
    for info in KINDS:
        schema = schemas[f"dev.paddock.v1alpha1.{info.kind}"]
        assert schema["x-kubernetes-group-version-kind"][0]["kind"] == info.kind
    assert "immutable" in response.headers["cache-control"]
    again = await client.get(url, headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304
    patch = response.json()["paths"][
        "/apis/paddock.dev/v1alpha1/namespaces/{namespace}/sandboxes/{name}"
    ]["patch"]
    assert {"dryRun", "fieldValidation"} <= {item["name"] for item in patch["parameters"]}
    v2 = (await client.get("/openapi/v2")).json()
    assert "dev.paddock.v1alpha1.Sandbox" in v2["definitions"]


async def test_health_and_version_are_served(client: httpx.AsyncClient):
    assert (await client.get("/readyz")).text == "ok"
    assert (await client.get("/version")).json()["major"] == "1"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (-1, "0s"), (-10, "<invalid>"), (119, "119s"), (120, "2m"), (150, "2m30s"),
        (3600, "60m"), (4 * 3600 + 60, "4h1m"), (30 * 3600, "30h"), (3 * 86400, "3d"),
        (3 * 86400 + 7200, "3d2h"), (100 * 86400, "100d"), (3 * 365 * 86400, "3y"),
        (20 * 365 * 86400, "20y"),
    ],
)  # fmt: skip
def test_ages_are_as_short_as_in_kubectl(seconds: int, text: str):
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert age(now - timedelta(seconds=seconds), now) == text


def test_paths_are_parsed_as_in_kubernetes():
    target = parse_path(f"{POOLS}/p/scale")
    assert target is not None
    assert (target.info.kind, target.namespace, target.name, target.subresource) == (
        "SandboxPool", "default", "p", "scale",
    )  # fmt: skip
    target = parse_path("/api/v1/namespaces/team")
    assert target is not None
    assert (target.info.kind, target.name, target.namespace) == ("Namespace", "team", None)
    target = parse_path("/api/v1/namespaces/team/events")
    assert target is not None
    assert (target.info.kind, target.namespace) == ("Event", "team")
