"""Requests made up from the declarative API's own OpenAPI documents: none is answered with a 5xx.

The documents say which paths, options and kinds there are; what is in a path and in a body follows
from that and is added here, so that there is something to read, change and delete.
"""

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from paddock.api.kube.app import create_app
from paddock.api.kube.openapi import document_v3
from paddock.api.kube.scheme import GROUP_VERSIONS
from paddock.api.kube.settings import KubeApiSettings
from paddock.store.memory import MemoryStore
from tests.fuzz import effort

TOKEN = "correct-horse"
URL = "http://testserver"
NAMES = {"namespace": ["default"], "name": ["x", "nobody"]}
EXAMPLE_FILES = Path(__file__).parents[2] / "examples"
PATCHES = (
    "application/merge-patch+json",
    "application/json-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
)
STEP = {
    "type": "object",
    "required": ["op", "path"],
    "properties": {
        "op": {"enum": ["add", "remove", "replace", "move", "copy", "test"]},
        "path": {"enum": ["", "/spec", "/metadata/labels", "/metadata/labels/a", "/status"]},
        "from": {"enum": ["", "/spec", "/metadata"]},
    },
}


def operations(group: str, version: str) -> list:
    document = json.loads(document_v3(group, version))
    schemas = {
        kind["kind"]: {"$ref": f"#/components/schemas/{name}"}
        for name, schema in document["components"]["schemas"].items()
        for kind in schema.get("x-kubernetes-group-version-kind", ())
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["parameters"] += [
                {"name": name, "in": "path", "required": True, "schema": {"enum": names}}
                for name, names in NAMES.items()
                if f"{{{name}}}" in path
            ]
            kind = schemas[operation["x-kubernetes-group-version-kind"]["kind"]]
            if content := bodies(method, kind):
                operation["requestBody"] = {"content": content}
    return [item.ok() for item in schemathesis.openapi.from_dict(document).get_all_operations()]


def examples() -> dict[str, dict[str, Any]]:
    """Give an object of each kind that has an example."""
    texts = (path.read_text() for path in sorted(EXAMPLE_FILES.glob("*.yaml")))
    found = (item for text in texts for item in yaml.safe_load_all(text) if item)
    return {item["kind"]: item for item in found}


def bodies(method: str, kind: dict[str, str]) -> dict[str, Any]:
    if method in ("post", "put"):
        return {"application/json": {"schema": kind}}
    if method == "patch":
        steps = {"type": "array", "items": STEP}
        return {name: {"schema": steps if "json-patch" in name else kind} for name in PATCHES}
    return {}


class Asked:
    """One API in this process, and what it answered."""

    def __init__(self, runner: asyncio.Runner) -> None:
        app = create_app(MemoryStore(history=50), KubeApiSettings(tokens=(TOKEN,)))
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url=URL,
            timeout=5,
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        self._runner = runner
        self._turns = itertools.count()
        self._examples = examples()
        self.answered = Counter[int]()

    def try_out(self, operation: Any) -> None:
        """Ask for one operation in several ways; there is something to do it to."""
        kind = operation.definition.raw["x-kubernetes-group-version-kind"]["kind"]
        place, name, _ = operation.path.replace("{namespace}", "default").partition("/{name}")
        there = {**self._examples.get(kind, {}), "metadata": {"name": "x"}}

        @settings(
            max_examples=effort.examples(4),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            # A watch does not end by itself.
            if case.query.get("watch") not in (None, False, "false", 0):
                return
            if next(self._turns) % 3:
                # Most options that are made up are refused, and so are unknown fields.
                case.query = {"fieldValidation": "Ignore", "fieldManager": "me"}
                if isinstance(case.body, dict):
                    case.body["metadata"] = {"name": "x" if name else "new"}
            if name:
                self._runner.run(self._client.post(place, json=there))
            request = case.as_transport_kwargs(base_url=URL)
            response = self._runner.run(self._client.request(**_plain(request)))
            self.answered[response.status_code] += 1
            assert response.status_code < 500, (request, response.text)

        ask()


@pytest.mark.timeout(effort.seconds(120))
@pytest.mark.parametrize(("group", "version"), GROUP_VERSIONS)
def test_no_request_by_the_document_is_answered_with_a_server_error(
    group: str, version: str
) -> None:
    with asyncio.Runner() as runner:
        api = Asked(runner)
        for operation in operations(group, version):
            if "/watch" not in operation.path:
                api.try_out(operation)
    # Who is not let in, or finds nothing there, has tried nothing.
    assert api.answered.keys().isdisjoint((401, 403)), api.answered
    assert api.answered[200] > api.answered.total() // 10, api.answered
    assert api.answered[201], api.answered


def _plain(request: dict) -> dict:
    """What the client of tests takes: it knows no raw values of headers."""
    headers = {str(name): str(value) for name, value in dict(request.get("headers") or {}).items()}
    kept = {key: request[key] for key in ("method", "url", "params", "json") if key in request}
    if "data" in request:
        kept["content"] = request["data"]
    return {**kept, "headers": headers}
