"""Bad input gets an error with a code and a message, never a 5xx.

Requests are generated from the served OpenAPI document and sent over a real socket to a real
control plane with a simulated runtime.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CheckContext
from schemathesis.config import SchemathesisConfig

from paddock.api.e2b.openapi import PREFIX, document
from tests.fuzz import fuzz_budget
from tests.ports import free_port

pytestmark = pytest.mark.timeout(fuzz_budget.seconds(120))
"""The first test waits for a process to start."""

SCHEMA = schemathesis.openapi.from_dict(
    # Generated keys would only be refused, so the generator does not see the security scheme.
    {**document(), "security": []},
    config=SchemathesisConfig(seed=fuzz_budget.source(1).getrandbits(64)),
)
NOT_OFFERED = 501
NEVER_OFFERED = {
    f"{method.upper()} {path}"
    for path, operations in document()["paths"].items()
    for method, operation in operations.items()
    if not any(status.startswith("2") for status in operation["responses"])
}
MANY = 3


class Server:
    """A control plane with some objects of every kind."""

    def __init__(self, url: str, *, key: str, token: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
        self.session, self.stranger = requests.Session(), requests.Session()
        self.session.headers["X-API-Key"] = key
        self._token = token
        self._names = itertools.count()
        self._sandbox = self._template = self._snapshot = self._key = ""

    def close(self) -> None:
        self.http.close()
        self.session.close()
        self.stranger.close()

    def sandbox(self, *, paused: bool = False) -> str:
        """Return the id of an existing sandbox, running or paused."""
        if not self._sandbox or self.http.get(f"/sandboxes/{self._sandbox}").is_error:
            self._sandbox = self._made("/v2/sandboxes", templateID="base", timeout=3600)[
                "sandboxID"
            ]
        doing = ("pause", {}) if paused else ("connect", {"timeout": 3600})
        self.http.post(f"/sandboxes/{self._sandbox}/{doing[0]}", json=doing[1])
        return self._sandbox

    def template(self) -> str:
        """Return the name of an existing template that no pool uses."""
        if not self._template or self.http.get(f"/templates/{self._template}").is_error:
            self._template = f"template{next(self._names)}"
            made = self.http.post(
                "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates",
                headers={"Authorization": f"Bearer {self._token}"},
                json={"metadata": {"name": self._template}, "spec": {}},
            )
            assert made.status_code == 201, made.text
        return self._template

    def snapshot(self) -> str:
        """Return the id of an existing snapshot."""
        listed = self.http.get("/snapshots").json()
        if self._snapshot not in {item["snapshotID"] for item in listed}:
            self._snapshot = self._made(f"/sandboxes/{self.sandbox()}/snapshots")["snapshotID"]
        return self._snapshot

    def key(self) -> str:
        """Return the id of an existing API key, other than the one in use."""
        if self._key not in {item["id"] for item in self.http.get("/api-keys").json()}:
            self._key = self._made("/api-keys", name="x", teamName=OTHERS)["id"]
        return self._key

    def build(self) -> tuple[str, str]:
        """Return the ids of a template and of a build of it that waits for its steps."""
        made = self.http.post("/v3/templates", json={"name": "built"})
        assert made.status_code == 202, made.text
        return made.json()["templateID"], made.json()["buildID"]

    def tagged(self) -> str:
        """Return the name of a template with a ready build."""
        name, build = self.build()
        url = f"/apis/paddock.dev/v1alpha1/namespaces/default/templatebuilds/{build}/status"
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/merge-patch+json",
        }
        status = {"status": {"phase": "Ready", "template": {}}}
        changed = self.http.patch(url, headers=headers, json=status)
        assert changed.status_code == 200, changed.text
        return name

    def upload(self) -> str:
        """Return a token for an upload."""
        name, _ = self.build()
        made = self.http.get(f"/templates/{name}/files/{'0' * 64}")
        assert made.status_code == 201, made.text
        return made.json()["url"].rpartition("/")[2]

    def _made(self, path: str, **body: object) -> dict[str, str]:
        made = self.http.post(path, json=body)
        assert made.status_code == 201, made.text
        return made.json()


OTHERS = "others"
"""A team whose quota may be changed freely."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    home = tmp_path_factory.mktemp("control")
    port = free_port()
    environment = os.environ | {
        "PADDOCK_STATE_DIR": str(home / "state"),
        "PADDOCK_RUN_DIR": str(home / "run"),
        "PADDOCK_API_PORT": str(port),
        "PADDOCK_KUBE_PORT": "0",
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
    return Server(url, key=secrets["api_key"], token=secrets["token"])


class Asked:
    """The requests and responses of one operation."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.operation = ""
        self.turns = itertools.count()
        self.answered = Counter[int]()

    def check(
        self, _context: CheckContext, response: schemathesis.Response, case: schemathesis.Case
    ) -> None:
        self.answered[response.status_code] += 1
        self.operation = case.operation.label
        if response.status_code < 400:
            assert self.operation not in NEVER_OFFERED
            return
        body = response.json()
        assert body["code"] == response.status_code
        assert body["message"]
        assert response.status_code < 500 or response.status_code == NOT_OFFERED, body
        if response.status_code == NOT_OFFERED and self.operation not in NEVER_OFFERED:
            # The message must name a feature, not the request or the runtime.
            assert " not supported" in body["message"], body
            assert str(NOT_OFFERED) in case.operation.definition.raw["responses"]

    def find_something(self, case: schemathesis.Case) -> None:
        """Use existing ids in a request: generated ids match nothing."""
        place, values = case.path, case.path_parameters
        if "/sandboxes/{id}" in place:
            values["id"] = self.server.sandbox(paused=place.endswith("/resume"))
        elif "/api-keys/{id}" in place:
            values["id"] = self.server.key()
        elif place == "/teams/{name}":
            values["name"] = OTHERS
        elif place.endswith("/templates/{id}"):
            is_kept = case.method != "DELETE" or next(self.turns) % 2
            values["id"] = self.server.template() if is_kept else self.server.snapshot()
        elif "alias" in values:
            values["alias"] = self.server.template()
        self._find_build(case)
        for name in {"sandboxID", "sandbox_ids"} & case.query.keys():
            case.query[name] = self.server.sandbox()
        if isinstance(case.body, dict):
            self._fill(case.body)

    def _find_build(self, case: schemathesis.Case) -> None:
        """Use existing builds, names and tokens in a request."""
        place, values = case.path, case.path_parameters
        if "/builds/{build}" in place:
            values["id"], values["build"] = self.server.build()
            if isinstance(case.body, dict):
                case.body = {"fromImage": "base", "force": True}
        elif place.endswith("/templates") and isinstance(case.body, dict):
            case.body = {"name": "built", "tags": ["v1"] if case.body.get("tags") else None}
        elif place.endswith("/files/{hash}"):
            values["id"], values["hash"] = self.server.build()[0], "0" * 64
        elif place.endswith("/uploads/{token}"):
            values["token"] = self.server.upload()
        elif "/templates/" in place and place.endswith("/tags"):
            name = self.server.tagged()
            if "id" in values:
                values["id"] = name
            if isinstance(case.body, dict):
                case.body |= {"tags": ["v1"], "target" if "target" in case.body else "name": name}

    def _fill(self, body: dict[str, object]) -> None:
        if "teamName" in body:
            body["teamName"] = OTHERS
        if "templateID" in body:
            body["templateID"] = self.server.template()
            # Unsupported fields would be refused before anything else is checked.
            for name in ("iam", "volumeMounts", "network"):
                body.pop(name, None)
        if isinstance(count := body.get("count"), int):
            body["count"] = count % MANY + 1

    def forget(self, response: schemathesis.Response) -> None:
        """Delete created sandboxes, since there will be many."""
        if response.status_code != 201:
            return
        found = response.json()
        for item in found if isinstance(found, list) else found.get("results", [found]):
            made = item.get("sandbox", item)
            if made and "sandboxID" in made:
                self.server.http.delete(f"/sandboxes/{made['sandboxID']}")


@pytest.fixture
def asked(server: Server) -> Generator[Asked]:
    asked = Asked(server)
    yield asked
    # Without any success the operation was not really tested.
    is_done = any(200 <= status < 300 for status in asked.answered)
    assert is_done or asked.operation in NEVER_OFFERED, (asked.operation, asked.answered)


@SCHEMA.parametrize()
@settings(
    max_examples=fuzz_budget.examples(8), deadline=None, suppress_health_check=list(HealthCheck)
)
def test_no_request_breaks_the_server(case: schemathesis.Case, asked: Asked) -> None:
    turn = next(asked.turns)
    if turn // 2 % 2:
        asked.find_something(case)
    if isinstance(case.body, dict) and "count" in case.body:
        # Large batches are covered by another test.
        wanted = case.body["count"]
        case.body["count"] = min(wanted, MANY) if isinstance(wanted, int) else 0
    response = case.call_and_validate(
        # Every second request goes to the document's other server.
        base_url=asked.server.url + (PREFIX if turn % 2 else ""),
        checks=[asked.check],
        session=asked.server.session if turn % 8 else asked.server.stranger,
        timeout=60,
    )
    asked.forget(response)


def test_the_openapi_document_names_both_prefixes_and_both_serve_it(server: Server) -> None:
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
    response = server.http.post("/v2/sandboxes", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["code"] == 400
    assert names in response.json()["message"] or not body


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    response = server.http.post("/v2/sandboxes", content=b" " * (2 << 20))
    assert response.status_code == 413
