"""Requests made up from the declarative API's own OpenAPI document: none is answered with a 5xx.

A fresh store for each path: what one request made must not make another's answer.
"""

import asyncio
import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from paddock.api.kube.app import create_app
from paddock.api.kube.openapi import document_v3
from paddock.api.kube.scheme import GROUP_VERSIONS
from paddock.api.kube.settings import KubeApiSettings
from paddock.store.memory import MemoryStore

EXAMPLES = 4


def operations(group: str, version: str) -> list:
    schema = schemathesis.openapi.from_dict(json.loads(document_v3(group, version)))
    return [item.ok() for item in schema.get_all_operations()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("group", "version"), GROUP_VERSIONS)
def test_no_request_by_the_document_is_answered_with_a_server_error(
    group: str, version: str
) -> None:
    app = create_app(MemoryStore(history=50), KubeApiSettings(allow_anonymous=True))
    asked = 0
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=5)
    with asyncio.Runner() as runner:
        for operation in operations(group, version):
            if "/watch" in operation.path:
                continue

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(operation.as_strategy())
            def ask(case: schemathesis.Case) -> None:
                nonlocal asked
                # A watch does not end by itself.
                if case.query.get("watch") not in (None, False, "false", 0):
                    return
                asked += 1
                request = case.as_transport_kwargs(base_url="http://testserver")
                request.pop("cookies", None)
                response = runner.run(client.request(**_plain(request)))
                assert response.status_code < 500, (request, response.text)

            ask()
        runner.run(client.aclose())
    assert asked > 10


def _plain(request: dict) -> dict:
    """What the client of tests takes: it knows no raw values of headers."""
    headers = {str(name): str(value) for name, value in dict(request.get("headers") or {}).items()}
    kept = {key: request[key] for key in ("method", "url", "params", "json") if key in request}
    if "data" in request:
        kept["content"] = request["data"]
    return {**kept, "headers": headers}
