"""Create, update, patch, apply, scale and delete; refused requests change nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from paddock.api.kube.body.apply import ANNOTATION
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key
from paddock.store.memory import MemoryStore
from paddock.store.sqlite.store import SqliteStore
from tests.api.kube.conftest import calling
from tests.api.kube.objects import CLAIMS, POOLS, SANDBOXES, pool, sandbox

MERGE = {"Content-Type": "application/merge-patch+json"}
JSON_PATCH = {"Content-Type": "application/json-patch+json"}
APPLY = {"Content-Type": "application/apply-patch+yaml"}


def causes(response: httpx.Response) -> list[str]:
    status = response.json()
    assert status["kind"] == "Status"
    assert status["code"] == response.status_code
    return [cause.get("field", "") for cause in status.get("details", {}).get("causes", [])]


async def count(store: MemoryStore) -> int:
    return len((await store.list(Sandbox)).items) + len((await store.list(SandboxPool)).items)


@pytest.mark.parametrize(
    ("body", "code", "reason", "field"),
    [
        (b"{", 400, "BadRequest", None),
        (b"", 400, "BadRequest", None),
        (b"[]", 400, "BadRequest", None),
        (b"\xff\xfe", 400, "BadRequest", None),
        (b'"text"', 400, "BadRequest", None),
        (b"[" * 5000 + b"]" * 5000, 400, "BadRequest", None),
        (json.dumps(pool() | {"kind": "Dinosaur"}).encode(), 422, "Invalid", "kind"),
        (json.dumps(pool() | {"apiVersion": "v1"}).encode(), 422, "Invalid", "apiVersion"),
        (json.dumps(pool(replicaz=1)).encode(), 400, "BadRequest", "spec.replicaz"),
        (json.dumps(pool(replicas="two")).encode(), 422, "Invalid", "spec.replicas"),
        (json.dumps(pool(replicas=-1)).encode(), 422, "Invalid", "spec.replicas"),
        (json.dumps(pool(replicas=10**30)).encode(), 422, "Invalid", "spec.replicas"),
        (json.dumps(pool("x" * 300)).encode(), 422, "Invalid", "metadata.name"),
        (json.dumps(pool("")).encode(), 422, "Invalid", "metadata.name"),
        (
            json.dumps(pool() | {"metadata": {"name": "p", "namespace": "other"}}).encode(),
            400,
            "BadRequest",
            "metadata.namespace",
        ),
        (
            json.dumps(pool() | {"metadata": {"name": "p", "labels": {"a": 1}}}).encode(),
            422,
            "Invalid",
            "metadata.labels.a",
        ),
        (json.dumps(pool(labels={"k": "x" * 10_000_000})).encode(), 413, None, None),
    ],
)
async def test_bad_bodies_are_refused_and_leave_nothing_behind(
    client: httpx.AsyncClient,
    store: MemoryStore,
    body: bytes,
    code: int,
    reason: str | None,
    field: str | None,
):
    response = await client.post(POOLS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == code
    found = causes(response)
    if reason:
        assert response.json()["reason"] == reason
    if field:
        assert field in found
    assert await count(store) == 0


async def test_an_invalid_enum_value_is_reported_with_the_valid_ones(
    client: httpx.AsyncClient,
):
    groups = {"default": {"scaleUpPolicy": "Fast"}}
    env = {
        "metadata": {"name": "agents"},
        "spec": {"templateRef": {"name": "t"}, "autoscaling": {"groups": groups}},
    }
    response = await client.post(POOLS.replace("sandboxpools", "sandboxenvs"), json=env)
    assert response.status_code == 422
    details = response.json()["details"]
    assert details["name"] == "agents"
    assert details["causes"] == [
        {
            "field": "spec.autoscaling.groups.default.scaleUpPolicy",
            "message": "'Fast' is not one of Conservative, Default, Aggressive",
            "reason": "FieldValueInvalid",
        }
    ]


async def test_unknown_fields_are_dropped_with_a_warning_if_requested(
    client: httpx.AsyncClient,
):
    warned = await client.post(POOLS, json=pool("a", x=1), params={"fieldValidation": "Warn"})
    assert warned.status_code == 201
    assert "spec.x" in warned.headers["warning"]
    ignored = await client.post(POOLS, json=pool("b", x=1), params={"fieldValidation": "Ignore"})
    assert ignored.status_code == 201
    assert "warning" not in ignored.headers


async def test_bodies_may_be_yaml_and_null_means_absent(client: httpx.AsyncClient):
    text = (
        "kind: Sandbox\nmetadata: {name: y, creationTimestamp: null}\n"
        "spec: {templateRef: {name: t}, shutdownTime: 2030-01-01T00:00:00Z, network: null}\n"
    )
    response = await client.post(
        SANDBOXES, content=text, headers={"Content-Type": "application/yaml"}
    )
    assert response.status_code == 201
    assert response.json()["spec"]["shutdownTime"] == "2030-01-01T00:00:00Z"


@pytest.mark.parametrize(
    "text", ["a: &x [1]\nb: *x", "1: 2", "a: .inf", "a: !!python/object:os.system {}", "\t: ["]
)
async def test_yaml_beyond_json_is_refused(client: httpx.AsyncClient, text: str):
    response = await client.post(
        SANDBOXES, content=text, headers={"Content-Type": "application/yaml"}
    )
    assert response.status_code == 400


async def test_generate_name_is_supported(client: httpx.AsyncClient):
    body = sandbox("") | {"metadata": {"generateName": "box-"}}
    response = await client.post(SANDBOXES, json=body)
    assert response.json()["metadata"]["name"].startswith("box-")


async def test_an_existing_name_is_reported(client: httpx.AsyncClient):
    await client.post(POOLS, json=pool())
    response = await client.post(POOLS, json=pool())
    assert response.status_code == 409
    assert response.json()["reason"] == "AlreadyExists"
    assert response.json()["message"] == 'sandboxpools.paddock.dev "p" already exists'


async def test_status_is_a_subresource(client: httpx.AsyncClient):
    created = (await client.post(POOLS, json=pool())).json()
    created["status"]["available"] = 7
    created["spec"]["replicas"] = 9
    plain = (await client.put(f"{POOLS}/p", json=created)).json()
    assert (plain["spec"]["replicas"], plain["status"]["available"]) == (9, 0)
    assert plain["metadata"]["generation"] == 2
    plain["status"]["available"] = 7
    plain["spec"]["replicas"] = 1
    written = (await client.put(f"{POOLS}/p/status", json=plain)).json()
    assert (written["spec"]["replicas"], written["status"]["available"]) == (9, 7)
    assert written["metadata"]["generation"] == 2
    patched = await client.patch(
        f"{POOLS}/p/status", content='{"status":{"available":8}}', headers=MERGE
    )
    assert patched.json()["status"]["available"] == 8


async def test_a_stale_version_is_a_conflict(client: httpx.AsyncClient):
    created = (await client.post(POOLS, json=pool())).json()
    fresh = await client.put(f"{POOLS}/p", json=created | {"spec": pool(replicas=2)["spec"]})
    assert fresh.status_code == 200
    stale = await client.put(f"{POOLS}/p", json=created | {"spec": pool(replicas=3)["spec"]})
    assert stale.status_code == 409
    assert stale.json()["reason"] == "Conflict"
    body = {"metadata": {"resourceVersion": created["metadata"]["resourceVersion"]}}
    patch = await client.patch(f"{POOLS}/p", content=json.dumps(body), headers=MERGE)
    assert patch.status_code == 409
    unconditional = await client.put(f"{POOLS}/p", json=pool(replicas=4))
    assert unconditional.json()["spec"]["replicas"] == 4


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/merge-patch+json", {"spec": {"replicas": 5}}),
        (
            "application/json-patch+json",
            [{"op": "replace", "path": "/spec/replicas", "value": 5}],
        ),
        ("application/strategic-merge-patch+json", {"spec": {"replicas": 5}}),
    ],
)
async def test_every_type_of_patch_is_applied(client: httpx.AsyncClient, kind: str, body: Any):
    await client.post(POOLS, json=pool())
    response = await client.patch(
        f"{POOLS}/p", content=json.dumps(body), headers={"Content-Type": kind}
    )
    assert response.status_code == 200
    assert response.json()["spec"]["replicas"] == 5


@pytest.mark.parametrize(
    ("kind", "patch", "kept"),
    [
        ("json-patch", [{"op": "remove", "path": "/metadata/finalizers/0"}], "b"),
        (
            "json-patch",
            [{"op": "add", "path": "/metadata/finalizers/-", "value": "x.dev/c"}],
            "abc",
        ),
        (
            "json-patch",
            [{"op": "test", "path": "/metadata/finalizers/1", "value": "x.dev/b"}],
            "ab",
        ),
        ("strategic-merge-patch", {"metadata": {"finalizers": ["x.dev/c"]}}, "abc"),
        ("merge-patch", {"metadata": {"finalizers": ["x.dev/c"]}}, "c"),
    ],
)
async def test_patches_reach_into_the_lists_of_stored_objects(
    client: httpx.AsyncClient, kind: str, patch: Any, kept: str
):
    made = pool()
    made["metadata"]["finalizers"] = ["x.dev/a", "x.dev/b"]
    await client.post(POOLS, json=made)

    response = await client.patch(
        f"{POOLS}/p",
        content=json.dumps(patch),
        headers={"Content-Type": f"application/{kind}+json"},
    )

    assert response.json()["metadata"]["finalizers"] == [f"x.dev/{one}" for one in kept]


async def test_two_managers_can_apply_the_same_list(client: httpx.AsyncClient):
    wanted = pool()
    wanted["metadata"]["finalizers"] = ["x.dev/a", "x.dev/b"]

    for manager in ("one", "two"):
        response = await client.patch(
            f"{POOLS}/p?fieldManager={manager}", content=json.dumps(wanted), headers=APPLY
        )
        assert response.is_success, response.text


async def test_concurrent_patches_all_take_effect(client: httpx.AsyncClient):
    await client.post(POOLS, json=pool())

    async def label(index: int) -> int:
        body = json.dumps({"metadata": {"labels": {f"n{index}": "x"}}})
        return (await client.patch(f"{POOLS}/p", content=body, headers=MERGE)).status_code

    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(label(index)) for index in range(40)]
    assert {task.result() for task in answers} == {200}
    labels = (await client.get(f"{POOLS}/p")).json()["metadata"]["labels"]
    assert len(labels) == 40


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [
        ("application/merge-patch+json", '{"spec":{"replicas":-5}}', 422),
        ("application/merge-patch+json", '{"metadata":{"name":"q"}}', 400),
        ("application/merge-patch+json", '{"kind":"Sandbox"}', 422),
        ("application/merge-patch+json", "null", 400),
        ("application/merge-patch+json", "{", 400),
        ("application/json-patch+json", '[{"op":"remove","path":"/spec/nothing"}]', 422),
        ("application/json-patch+json", '[{"op":"remove","path":"/spec"}]', 422),
        ("application/json-patch+json", "{}", 422),
        ("application/apply-patch+yaml", "{}", 422),
        ("text/plain", "{}", 415),
    ],
)
async def test_an_invalid_patch_changes_nothing(
    client: httpx.AsyncClient, kind: str, body: str, code: int
):
    before = (await client.post(POOLS, json=pool())).json()
    response = await client.patch(f"{POOLS}/p", content=body, headers={"Content-Type": kind})
    assert response.status_code == code, response.text
    assert response.json()["kind"] == "Status"
    assert (await client.get(f"{POOLS}/p")).json() == before


async def test_immutable_fields_cannot_be_changed(client: httpx.AsyncClient):
    claim = {"kind": "SandboxClaim", "metadata": {"name": "c"}, "spec": {"templateName": "t"}}
    await client.post(CLAIMS, json=claim)
    response = await client.patch(f"{CLAIMS}/c", content='{"spec":{"replicas":2}}', headers=MERGE)
    assert response.status_code == 422
    assert causes(response) == ["spec.replicas"]


async def test_apply_creates_changes_and_is_idempotent(
    client: httpx.AsyncClient, store: MemoryStore
):
    params = {"fieldManager": "me"}
    first = await client.patch(
        f"{POOLS}/p",
        content=json.dumps(pool(labels={"a": "1", "b": "2"})),
        headers=APPLY,
        params=params,
    )
    assert first.status_code == 201
    again = await client.patch(
        f"{POOLS}/p",
        content=json.dumps(pool(labels={"a": "1", "b": "2"})),
        headers=APPLY,
        params=params,
    )
    assert again.status_code == 200
    assert again.json() == first.json()
    less = await client.patch(
        f"{POOLS}/p", content=json.dumps(pool(labels={"a": "1"})), headers=APPLY, params=params
    )
    assert less.json()["spec"]["labels"] == {"a": "1"}
    managers = less.json()["metadata"]["managedFields"]
    assert [item["manager"] for item in managers] == ["me"]
    assert ANNOTATION not in less.json()["metadata"].get("annotations", {})
    stored = await store.get(SandboxPool, Key("default", "p"))
    assert ANNOTATION in stored.metadata.annotations


async def test_concurrent_applies_create_one_merged_object(tmp_path: Path):
    async def apply(client: httpx.AsyncClient, index: int) -> int:
        body = pool() | {"metadata": {"name": "p", "labels": {f"n{index}": "x"}}}
        response = await client.patch(
            f"{POOLS}/p",
            content=json.dumps(body),
            headers=APPLY,
            params={"fieldManager": f"m{index}"},
        )
        return response.status_code

    # Writes are slow here, so that every apply finds no object at first.
    async with await SqliteStore.open(tmp_path / "store.db") as store, calling(store) as client:
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(apply(client, index)) for index in range(10)]
        labels = (await client.get(f"{POOLS}/p")).json()["metadata"]["labels"]
    assert sorted(task.result() for task in answers) == [200] * 9 + [201]
    assert len(labels) == 10


async def test_conflicting_applies_can_be_forced(
    client: httpx.AsyncClient,
):
    async def apply(manager: str, replicas: int, force: str = "false") -> httpx.Response:
        return await client.patch(
            f"{POOLS}/p",
            content=json.dumps(pool(replicas=replicas)),
            headers=APPLY,
            params={"fieldManager": manager, "force": force},
        )

    await apply("one", 1)
    refused = await apply("two", 2)
    assert refused.status_code == 409
    assert causes(refused) == ["spec.replicas"]
    assert refused.json()["details"]["causes"][0]["reason"] == "FieldManagerConflict"
    assert (await apply("two", 2, "true")).json()["spec"]["replicas"] == 2
    assert (await apply("one", 3)).status_code == 409


async def test_ownership_survives_other_writes(client: httpx.AsyncClient):
    await client.patch(
        f"{POOLS}/p", content=json.dumps(pool()), headers=APPLY, params={"fieldManager": "me"}
    )
    seen = (await client.get(f"{POOLS}/p")).json()
    del seen["metadata"]["managedFields"]
    replaced = (await client.put(f"{POOLS}/p", json=seen)).json()
    assert [item["manager"] for item in replaced["metadata"]["managedFields"]] == ["me"]


async def test_scale_can_be_read_and_written(client: httpx.AsyncClient):
    await client.post(POOLS, json=pool())
    scale = (await client.get(f"{POOLS}/p/scale")).json()
    assert (scale["kind"], scale["spec"]) == ("Scale", {"replicas": 1})
    scale["spec"]["replicas"] = 4
    assert (await client.put(f"{POOLS}/p/scale", json=scale)).json()["spec"]["replicas"] == 4
    patched = await client.patch(
        f"{POOLS}/p/scale", content='{"spec":{"replicas":6}}', headers=MERGE
    )
    assert patched.json()["spec"]["replicas"] == 6
    bad = await client.patch(f"{POOLS}/p/scale", content='{"spec":{"replicas":"x"}}', headers=MERGE)
    assert causes(bad) == ["spec.replicas"]
    assert (await client.get(f"{POOLS}/p")).json()["spec"]["replicas"] == 6


async def test_a_dry_run_returns_the_result_and_stores_nothing(
    client: httpx.AsyncClient, store: MemoryStore
):
    params = {"dryRun": "All"}
    created = await client.post(POOLS, json=pool(), params=params)
    assert created.status_code == 201
    assert created.json()["metadata"]["uid"]
    assert await count(store) == 0
    await client.post(POOLS, json=pool())
    patched = await client.patch(
        f"{POOLS}/p", content='{"spec":{"replicas":5}}', headers=MERGE, params=params
    )
    assert patched.json()["spec"]["replicas"] == 5
    await client.request("DELETE", f"{POOLS}/p", params=params)
    assert (await client.get(f"{POOLS}/p")).json()["spec"]["replicas"] == 1
    assert (await client.post(POOLS, json=pool("x"), params={"dryRun": "Some"})).status_code == 400


async def test_a_deletion_returns_a_status_or_the_pending_object(client: httpx.AsyncClient):
    await client.post(POOLS, json=pool())
    gone = (await client.delete(f"{POOLS}/p")).json()
    assert (gone["kind"], gone["status"]) == ("Status", "Success")
    assert gone["details"]["uid"]
    held = pool() | {"metadata": {"name": "p", "finalizers": ["example.com/hold"]}}
    await client.post(POOLS, json=held)
    pending = (await client.delete(f"{POOLS}/p")).json()
    assert pending["kind"] == "SandboxPool"
    assert pending["metadata"]["deletionTimestamp"]
    await client.patch(f"{POOLS}/p", content='{"metadata":{"finalizers":null}}', headers=MERGE)
    assert (await client.get(f"{POOLS}/p")).status_code == 404


async def test_deletion_honours_preconditions_and_propagation(client: httpx.AsyncClient):
    owner = (await client.post(POOLS, json=pool())).json()["metadata"]
    reference = {
        "apiVersion": "paddock.dev/v1alpha1", "kind": "SandboxPool",
        "name": "p", "uid": owner["uid"],
    }  # fmt: skip
    await client.post(SANDBOXES, json=sandbox("child", ownerReferences=[reference]))

    async def delete(body: dict[str, Any]) -> httpx.Response:
        return await client.request("DELETE", f"{POOLS}/p", json=body)

    assert (await delete({"preconditions": {"uid": "other"}})).status_code == 409
    assert (await delete({"propagationPolicy": "Sideways"})).status_code == 422
    assert (await delete({"preconditions": {"uid": 7}})).status_code == 400
    gone = await delete({"propagationPolicy": "Orphan", "preconditions": {"uid": owner["uid"]}})
    assert gone.status_code == 200
    child = (await client.get(f"{SANDBOXES}/child")).json()
    assert "ownerReferences" not in child["metadata"]


async def test_a_collection_is_deleted_by_selector(client: httpx.AsyncClient):
    for name in ("a", "b", "c"):
        await client.post(SANDBOXES, json=sandbox(name, labels={"odd": str(name != "b").lower()}))
    response = await client.delete(SANDBOXES, params={"labelSelector": "odd=true"})
    assert [item["metadata"]["name"] for item in response.json()["items"]] == ["a", "c"]
    left = (await client.get(SANDBOXES)).json()["items"]
    assert [item["metadata"]["name"] for item in left] == ["b"]


async def test_unsupported_verbs_are_not_allowed(client: httpx.AsyncClient):
    for method, path in (
        ("PUT", POOLS),
        ("POST", f"{POOLS}/p"),
        ("DELETE", f"{POOLS}/p/status"),
        ("POST", "/apis/paddock.dev/v1alpha1/sandboxes"),
        ("POST", "/version"),
    ):
        response = await client.request(method, path, json={})
        assert response.status_code == 405, (method, path)
        assert response.json()["reason"] == "MethodNotAllowed"


async def test_secrets_accept_string_data(client: httpx.AsyncClient):
    body = {
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"a": "YQ=="},
        "stringData": {"b": "b"},
    }
    made = await client.post("/api/v1/namespaces/default/secrets", json=body)
    assert made.json()["data"] == {"a": "YQ==", "b": "Yg=="}
