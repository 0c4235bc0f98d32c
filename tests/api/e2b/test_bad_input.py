"""Whatever a client sends, it is told what was wrong: never a 5xx, never an error without a code.

The requests are drawn from the served OpenAPI document and go over a real socket to a real
control plane whose runtime is simulated.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CheckContext

from paddock.api.e2b.openapi import PREFIX, document
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)
"""Its first test waits for a process to start."""

SCHEMA = schemathesis.openapi.from_dict(document())
NOT_OFFERED = 501
FORKS = 3
_turn = itertools.count()


class Server:
    """A control plane of its own, and a sandbox in it."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
        self.session = requests.Session()
        self.sandbox_id = ""

    def close(self) -> None:
        self.http.close()
        self.session.close()

    def live_id(self) -> str:
        """The id of a sandbox that is there."""
        if self.sandbox_id and self.http.get(f"/sandboxes/{self.sandbox_id}").status_code == 200:
            return self.sandbox_id
        made = self.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 3600})
        assert made.status_code == 201, made.text
        self.sandbox_id = made.json()["sandboxID"]
        return self.sandbox_id


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    home = tmp_path_factory.mktemp("control")
    port = free_port()
    environment = os.environ | {
        "PADDOCK_STATE_DIR": str(home / "state"),
        "PADDOCK_RUN_DIR": str(home / "run"),
        "PADDOCK_API_PORT": str(port),
        "PADDOCK_STORE": "memory",
        "PADDOCK_RUNTIME": "simulated",
        "PADDOCK_POOL_SIZE": "4",
    }
    log = home / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "paddock.app", "control"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        with contextlib.closing(_connected(f"http://127.0.0.1:{port}", home, process, log)) as made:
            yield made
    finally:
        process.terminate()
        process.wait(60)
    assert "Traceback" not in log.read_text()


def _connected(url: str, home: Path, process: subprocess.Popen[bytes], log: Path) -> Server:
    deadline = time.monotonic() + 100
    while True:
        assert process.poll() is None, log.read_text()
        try:
            httpx.get(f"{url}/health")
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    secrets = msgspec.json.decode((home / "state" / "secrets.json").read_bytes())
    return Server(url, secrets["api_key"])


def no_crash(_context: CheckContext, response: schemathesis.Response, _case: object) -> None:
    if response.status_code < 400:
        return
    body = response.json()
    assert body["code"] == response.status_code
    assert body["message"]
    assert response.status_code < 500 or response.status_code == NOT_OFFERED, body


@SCHEMA.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server(case: schemathesis.Case, server: Server) -> None:
    turn = next(_turn)
    if "id" in case.path_parameters and "/sandboxes/" in case.path and turn // 2 % 2:
        case.path_parameters["id"] = server.live_id()
    if case.path.endswith("/fork") and isinstance(case.body, dict) and "count" in case.body:
        # As many as are allowed would be many: that is another test's business.
        case.body["count"] = min(case.body["count"], FORKS) if _is_number(case) else 0
    headers = {"X-API-Key": server.http.headers["X-API-Key"]}
    case.call_and_validate(
        # Every second request goes to the document's other server.
        base_url=server.url + (PREFIX if turn % 2 else ""),
        headers=headers,
        checks=[no_crash],
        session=server.session,
        timeout=60,
    )


def _is_number(case: schemathesis.Case) -> bool:
    return isinstance(case.body["count"], int)


def test_the_served_document_names_both_places_and_both_serve_it(server: Server) -> None:
    served = server.http.get("/openapi.json").json()
    assert [item["url"] for item in served["servers"]] == ["/", PREFIX]
    assert server.http.get(f"{PREFIX}/openapi.json").json() == served
    for path, operations in served["paths"].items():
        if "get" in operations and "{" not in path:
            codes = {server.http.get(at + path).status_code for at in ("", PREFIX)}
            assert len(codes) == 1, path
            assert codes != {404}, path


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", "templateID"),
        (b"{", "truncated"),
        (b"[]", "object"),
        (b"\xff\xfe", "malformed"),
        (b'{"templateID": 5}', "templateID"),
        (b'{"templateID": "base", "timeout": "x"}', "timeout"),
        (b'{"templateID": "base", "timeout": -1}', "timeout"),
        (b'{"templateID": "base", "timeout": 99999999}', "timeout"),
        (b'{"templateID": "base", "envVars": {"A=B": "1"}}', "envVars"),
        (b'{"templateID": "base", "metadata": {"paddock.dev/x": "1"}}', "metadata"),
        (b'{"templateID": "base", "autoResume": {"enabled": true}}', "autoResume"),
        (b'{"templateID": "../etc"}', "templateID"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(server: Server, body: bytes, names: str) -> None:
    answer = server.http.post("/v2/sandboxes", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == 400
    assert names in answer.json()["message"] or not body


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    answer = server.http.post("/v2/sandboxes", content=b" " * (2 << 20))
    assert answer.status_code == 413
