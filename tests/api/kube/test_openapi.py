"""The OpenAPI documents are complete enough to generate clients."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.api.kube.objects import POOLS, pool

OURS = "apis/paddock.dev/v1alpha1"


async def documents(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Return all served documents, by path."""
    index = (await client.get("/openapi/v3")).json()["paths"]
    places = {name: item["serverRelativeURL"] for name, item in index.items()}
    places["version 2"] = "/openapi/v2"
    return {name: (await client.get(place)).json() for name, place in places.items()}


async def test_path_parameters_and_bodies_are_declared(client: httpx.AsyncClient):
    for document in (await documents(client)).values():
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                places = {item["name"]: item["in"] for item in operation["parameters"]}
                in_path = {name for name, place in places.items() if place == "path"}
                assert in_path == set(re.findall(r"{(\w+)}", path))
                has_body = "requestBody" in operation or places.get("body") == "body"
                assert has_body == (method != "get"), (method, path)


async def test_all_references_of_a_document_resolve(client: httpx.AsyncClient):
    for document in (await documents(client)).values():
        known = document.get("definitions") or document["components"]["schemas"]
        pattern = r'"#/(?:definitions|components/schemas)/(.*?)"'
        assert set(re.findall(pattern, json.dumps(document))) <= known.keys()


async def test_operation_ids_are_unique(client: httpx.AsyncClient):
    for document in (await documents(client)).values():
        names = [
            operation["operationId"]
            for methods in document["paths"].values()
            for operation in methods.values()
        ]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("part", ["", "/status", "/scale"])
async def test_responses_match_the_document(client: httpx.AsyncClient, part: str):
    assert (await client.post(POOLS, json=pool("p"))).status_code == 201
    document = (await documents(client))[OURS]
    said = document["paths"][f"{POOLS}/{{name}}{part}".replace("default", "{namespace}")]
    for name, code in (("p", "200"), ("nobody", "default")):
        found = (await client.get(f"{POOLS}/{name}{part}")).json()
        schema = said["get"]["responses"][code]["content"]["application/json"]["schema"]
        kind = schema["$ref"].rpartition("/")[2]
        assert kind.endswith(f".{found['kind']}")
        assert found.keys() <= document["components"]["schemas"][kind]["properties"].keys()
