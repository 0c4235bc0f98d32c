"""Requests generated from the declarative API's OpenAPI documents: none returns a 5xx.

Most generated requests name no existing object, so two of three are changed to name one and to
contain no invalid options.
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
from paddock.api.kube.openapi.documents import document_v3
from paddock.api.kube.scheme import GROUP_VERSIONS
from paddock.api.kube.settings import KubeApiSettings
from paddock.store.memory import MemoryStore
from tests.fuzz import fuzz_budget

TOKEN = "correct-horse"
URL = "http://testserver"
EXAMPLE_FILES = Path(__file__).parents[2] / "examples"
PLACES = ("", "/spec", "/metadata/labels", "/metadata/labels/a", "/status")
KIND = "x-kubernetes-group-version-kind"


def examples() -> dict[str, dict[str, Any]]:
    """Return an object of each kind that has an example."""
    texts = (path.read_text() for path in sorted(EXAMPLE_FILES.glob("*.yaml")))
    found = (item for text in texts for item in yaml.safe_load_all(text) if item)
    return {item["kind"]: item for item in found}


class Asked:
    """One API in this process, and its responses."""

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

    def try_out(self, operation: Any, kind: str) -> None:
        """Send several requests for one operation, with an existing object."""
        place, name, _ = operation.path.replace("{namespace}", "default").partition("/{name}")
        there = {**self._examples.get(kind, {}), "metadata": {"name": "x"}}

        @settings(
            max_examples=fuzz_budget.examples(4),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            case.query.pop("watch", None)  # a watch does not end by itself
            case.headers.pop("Authorization", None)
            if next(self._turns) % 3:
                find_something(case)
            if name:
                self._runner.run(self._client.post(place, json=there))
            request = case.as_transport_kwargs(base_url=URL)
            response = self._runner.run(self._client.request(**_plain(request)))
            self.answered[response.status_code] += 1
            assert response.status_code < 500, (request, response.text)

        ask()


def find_something(case: schemathesis.Case) -> None:
    """Make a request name the existing object; most generated options would be refused."""
    case.query = {"fieldValidation": "Ignore", "fieldManager": "me"}
    is_named = "name" in case.path_parameters
    case.path_parameters |= {
        name: value
        for name, value in {"namespace": "default", "name": "x"}.items()
        if name in case.path_parameters
    }
    if isinstance(case.body, dict):
        case.body["metadata"] = {"name": "x" if is_named else "new"}
    elif isinstance(case.body, list):
        for number, step in enumerate(case.body):
            step["path"] = PLACES[number % len(PLACES)]


@pytest.mark.timeout(fuzz_budget.seconds(120))
@pytest.mark.parametrize(("group", "version"), GROUP_VERSIONS)
def test_no_documented_request_is_a_server_error(group: str, version: str) -> None:
    document = json.loads(document_v3(group, version))
    kinds = {
        path: methods["post"][KIND]["kind"]
        for path, methods in document["paths"].items()
        if "post" in methods
    }
    with asyncio.Runner() as runner:
        api = Asked(runner)
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = found.ok()
            api.try_out(operation, kinds.get(operation.path.partition("/{name}")[0], ""))
    # Requests that are refused or find no object test nothing.
    assert api.answered.keys().isdisjoint((401, 403)), api.answered
    assert api.answered[200] > api.answered.total() // 10, api.answered
    assert api.answered[201], api.answered


def _plain(request: dict) -> dict:
    """Return the request in the form that the test client accepts, without raw header values."""
    headers = {str(name): str(value) for name, value in dict(request.get("headers") or {}).items()}
    kept = {key: request[key] for key in ("method", "url", "params", "json") if key in request}
    if "data" in request:
        kept["content"] = request["data"]
    return {**kept, "headers": headers}
