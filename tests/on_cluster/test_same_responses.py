"""Paddock's API and a real API server give the same responses to the same requests.

Compared are the status code, the reason, the invalid field (Paddock may name one where the server
names none), and the resulting spec (without the defaults that only Paddock shows).
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from paddock.api.kube.settings import KubeApiSettings
from tests.api.kube.server import Server, serving
from tests.cluster.control_plane import ClusterInfo
from tests.cluster.users import TOKENS

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

TOKEN = "correct-horse"
JSON, MERGE = "application/json", "application/merge-patch+json"
JSON_PATCH, APPLY = "application/json-patch+json", "application/apply-patch+yaml"


class Step(NamedTuple):
    """One request; `{ns}` in the path is replaced."""

    method: str
    path: str
    body: Any = None
    kind: str = JSON


class ComparedResponse(NamedTuple):
    """The compared parts of a response."""

    code: int
    reason: str
    blamed: frozenset[str]
    spec: Any


def pool(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxPool",
        "metadata": {"name": name},
        "spec": {"templateRef": {"name": "t"}} | spec,
    }


ROOT = "/apis/paddock.dev/v1alpha1/namespaces/{ns}"
POOLS, CLAIMS = f"{ROOT}/sandboxpools", f"{ROOT}/sandboxclaims"
P = f"{POOLS}/p"
CLAIM = {
    "apiVersion": "paddock.dev/v1alpha1",
    "kind": "SandboxClaim",
    "metadata": {"name": "c"},
    "spec": {"templateName": "t", "replicas": 2},
}
CONVERSATION = (
    Step("GET", P),
    Step("POST", POOLS, pool("p", replicas=1)),
    Step("POST", POOLS, pool("p", replicas=1)),
    Step("POST", POOLS, pool("q", replicas=-1)),
    Step("POST", POOLS, pool("q")),
    Step("POST", POOLS, pool("Q", replicas=1)),
    Step("POST", POOLS, "not an object"),
    Step("POST", POOLS, pool("q", replicas=1) | {"kind": "Sandbox"}),
    Step("POST", POOLS, pool("q", replicas="many")),
    Step("POST", f"{POOLS}?dryRun=All", pool("dry", replicas=1)),
    Step("GET", f"{POOLS}/dry"),
    Step("POST", f"{POOLS}?fieldValidation=Strict", pool("q", replicas=1, nonsense=1)),
    Step("PATCH", P, {"spec": {"replicas": 3}}, MERGE),
    Step("PATCH", P, {"spec": {"replicas": None, "capacity": {"bufferMin": 1}}}, MERGE),
    Step("PATCH", P, {"spec": {"replicas": 3, "labels": {"a": "1", "b": "2"}}}, MERGE),
    Step("PATCH", P, {"spec": {"labels": {"a": None}}}, MERGE),
    Step("PATCH", P, {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 4}}, MERGE),
    Step("PATCH", P, [{"op": "replace", "path": "/spec/replicas", "value": 5}], JSON_PATCH),
    Step("PATCH", P, [{"op": "test", "path": "/spec/replicas", "value": 9}], JSON_PATCH),
    Step("PATCH", P, [{"op": "remove", "path": "/spec/nothing"}], JSON_PATCH),
    Step("PATCH", P, {"spec": {"replicas": 6}}, "text/plain"),
    Step("PATCH", f"{P}/status", {"status": {"available": 2}, "spec": {"replicas": 9}}, MERGE),
    Step("GET", P),
    Step("PATCH", f"{P}/scale", {"spec": {"replicas": 7}}, MERGE),
    Step("GET", f"{P}/scale"),
    Step("PUT", P, pool("other", replicas=1)),
    Step("PATCH", f"{POOLS}/a", pool("a", replicas=1), APPLY),
    Step("PATCH", f"{POOLS}/a?fieldManager=one", pool("a", replicas=1, paused=True), APPLY),
    Step("PATCH", f"{POOLS}/a?fieldManager=one", pool("a", replicas=1, paused=True), APPLY),
    Step("PATCH", f"{POOLS}/a?fieldManager=two", pool("a", replicas=2), APPLY),
    Step("PATCH", f"{POOLS}/a?fieldManager=two&force=true", pool("a", replicas=2), APPLY),
    Step("PATCH", f"{POOLS}/a?fieldManager=one", pool("a", replicas=1), APPLY),
    Step("PATCH", f"{POOLS}/a?fieldManager=one", pool("a"), APPLY),
    Step("POST", CLAIMS, CLAIM),
    Step("PATCH", f"{CLAIMS}/c", {"spec": {"replicas": 3}}, MERGE),
    Step("PATCH", f"{CLAIMS}/c", {"spec": {"templateName": "u"}}, MERGE),
    Step("DELETE", P, {"preconditions": {"uid": "somebody-else"}}),
    Step("DELETE", f"{P}?propagationPolicy=Sideways"),
    Step("DELETE", P),
    Step("DELETE", P),
    Step("DELETE", POOLS),
    Step("GET", POOLS),
    Step("GET", f"{ROOT}/dinosaurs"),
)


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serving(KubeApiSettings(tokens=(TOKEN,))) as server:
        yield server


def send(
    server: str, step: Step, namespace: str, token: str = "", ca: str | None = None
) -> ComparedResponse:
    request = urllib.request.Request(
        server + step.path.replace("{ns}", namespace),
        method=step.method,
        data=None if step.body is None else json.dumps(step.body).encode(),
        headers={"Content-Type": step.kind, "Accept": JSON}
        | ({"Authorization": f"Bearer {token}"} if token else {}),
    )
    context = ssl.create_default_context(cafile=ca) if ca else None
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as response:
            code, document = response.status, json.load(response)
    except urllib.error.HTTPError as error:
        code, document = error.code, _json(error.read())
    causes = (document.get("details") or {}).get("causes", []) if code >= 400 else []
    return ComparedResponse(
        code,
        document.get("reason", "") if code >= 400 else "",
        frozenset(cause.get("field", "").lstrip(".") for cause in causes),
        _spec(document) if code < 400 else None,
    )


def _json(data: bytes) -> dict[str, Any]:
    try:
        return json.loads(data)
    except ValueError:
        return {}  # the server's 404 of an unknown path is plain text


def _spec(document: dict[str, Any]) -> Any:
    spec = dict(document.get("spec") or {})
    for name, value in {
        "algorithm": "packed", "evictionHandler": "default", "paused": False,
        "updateStrategy": {"maxUnavailable": "20%", "paused": False},
        "recycleStrategy": {"maxRecycles": 10, "timeoutSeconds": 60, "type": "Delete"},
        "claimTimeoutSeconds": 60, "waitReadyTimeoutSeconds": 30, "priority": 0,
        "ttlSecondsAfterCompleted": 3600, "createOnNoStock": True, "reserveFailedSandbox": False,
    }.items():  # fmt: skip
        if spec.get(name) == value:
            del spec[name]
    return spec


def _agree(mine: ComparedResponse, theirs: ComparedResponse) -> bool:
    is_same_reason = mine.reason == theirs.reason or (theirs.code == 404 and not theirs.reason)
    is_same_blame = not theirs.blamed or bool(mine.blamed & theirs.blamed)
    return (
        mine.code == theirs.code and mine.spec == theirs.spec and is_same_reason and is_same_blame
    )


def test_both_give_the_same_responses(kube_cluster: ClusterInfo, kube_namespace: str, ours: Server):
    differences: list[str] = []
    for number, step in enumerate(CONVERSATION):
        theirs = send(
            kube_cluster.server, step, kube_namespace, TOKENS["admin"], kube_cluster.ca_file
        )
        mine = send(ours.url, step, "default", TOKEN)
        if not _agree(mine, theirs):
            differences.append(f"{number} {step.method} {step.path}: {mine} but {theirs}")
    assert not differences, "\n".join(differences)


def test_a_member_removed_by_its_owner_is_deleted_with_fields_of_controllers(
    kube_cluster: ClusterInfo, kube_namespace: str, ours: Server
):
    def env(*members: str) -> dict[str, Any]:
        said = {name: {"config": {"maxReplicas": 3}} for name in members}
        return {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxEnv",
            "metadata": {"name": "e"},
            "spec": {"templateRef": {"name": "t"}, "clusters": {"local": {"members": said}}},
        }

    place = f"{ROOT}/sandboxenvs/e"
    grown = {"spec": {"clusters": {"local": {"members": {"b": {"replicas": 5}}}}}}
    for step, left in (
        (Step("PATCH", f"{place}?fieldManager=owner", env("a", "b"), APPLY), {"a", "b"}),
        (Step("PATCH", f"{place}?fieldManager=paddock", grown, MERGE), {"a", "b"}),
        (Step("PATCH", f"{place}?fieldManager=owner", env("a"), APPLY), {"a"}),
    ):
        theirs = send(
            kube_cluster.server, step, kube_namespace, TOKENS["admin"], kube_cluster.ca_file
        )
        mine = send(ours.url, step, "default", TOKEN)
        for answer in (mine, theirs):
            assert set(answer.spec["clusters"]["local"]["members"]) == left
