"""Garbage gets a status below 500 and leaves nothing in the store."""

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddock.api.kube.app import create_app
from paddock.api.kube.body.protobuf import MEDIA_TYPE
from paddock.api.kube.settings import KubeApiSettings
from paddock.resources.registry import ALL
from paddock.store.memory import MemoryStore
from tests.api.kube.conftest import TOKEN
from tests.api.kube.objects import POOLS, ROOT, SANDBOXES, pool, sandbox
from tests.fuzz import fuzz_budget

pytestmark = pytest.mark.timeout(fuzz_budget.seconds(180))

quick = settings(
    max_examples=fuzz_budget.examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
segments = st.one_of(
    st.sampled_from(
        ["api", "apis", "v1", "paddock.dev", "v1alpha1", "namespaces", "default", "sandboxes", "s",
         "sandboxpools", "p", "status", "scale", "events", "secrets", "leases", "openapi", "v2",
         "v3", "..", "%2e%2e", "%00", "%2F"]
    ),
    st.text(max_size=8),
)  # fmt: skip
paths = st.one_of(
    st.lists(segments, max_size=8).map(lambda parts: "/" + "/".join(parts)),
    st.sampled_from(
        [POOLS, f"{POOLS}/p", f"{POOLS}/p/scale", f"{POOLS}/p/status", f"{SANDBOXES}/s", ROOT,
         "/api/v1/namespaces", "/api/v1/namespaces/default/secrets",
         "/api/v1/namespaces/default/events",
         "/apis/coordination.k8s.io/v1/namespaces/default/leases"]
    ),
)  # fmt: skip
json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=20,
)
fields = st.dictionaries(
    st.sampled_from(
        ["name", "namespace", "labels", "annotations", "finalizers", "ownerReferences", "uid",
         "resourceVersion", "generateName", "templateRef", "template", "replicas", "capacity",
         "ports", "env", "network", "claim", "creationTimestamp", "managedFields", "data",
         "stringData", "updateStrategy", "labels"]
    ),
    json_values,
    max_size=5,
)  # fmt: skip
likely = st.fixed_dictionaries(
    {},
    optional={
        "apiVersion": st.sampled_from(["paddock.dev/v1alpha1", "v1", "", 7, None]),
        "kind": st.sampled_from(["Sandbox", "SandboxPool", "Secret", "", 7, None]),
        "metadata": st.one_of(fields, json_values),
        "spec": st.one_of(fields, json_values),
        "status": json_values,
        "data": json_values,
        "stringData": json_values,
        "op": st.just("add"),
        "path": st.sampled_from(["/spec", "/metadata/labels/a", ""]),
        "value": json_values,
    },
)
bodies = st.one_of(
    st.binary(max_size=200),
    json_values.map(lambda value: json.dumps(value).encode()),
    likely.map(lambda value: json.dumps(value).encode()),
    likely.map(lambda value: json.dumps([value]).encode()),
    st.binary(max_size=100).map(lambda data: b"k8s\x00" + data),
)
types = st.sampled_from(
    ["application/json", "application/yaml", "application/merge-patch+json",
     "application/json-patch+json", "application/strategic-merge-patch+json",
     "application/apply-patch+yaml", MEDIA_TYPE, "text/plain", ""]
)  # fmt: skip
queries = st.dictionaries(
    st.sampled_from(
        ["limit", "continue", "labelSelector", "fieldSelector", "resourceVersion", "dryRun",
         "fieldManager", "force", "fieldValidation", "includeObject", "propagationPolicy",
         "timeoutSeconds", "pretty"]
    ),
    st.one_of(st.text(max_size=10), st.sampled_from(["All", "me", "true", "1", "Strict", "Warn"])),
    max_size=3,
)  # fmt: skip
methods = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"])


async def everything(store: MemoryStore) -> dict[str, str]:
    found: dict[str, str] = {}
    for info in ALL:
        for obj in (await store.list(info.cls)).items:
            found[f"{info.kind} {obj.key}"] = obj.metadata.resource_version
    return found


async def throw(
    method: str, path: str, body: bytes, kind: str, query: dict[str, str], accept: str
) -> tuple[httpx.Response, bool]:
    """Send one request to an API with two objects; return whether the store is unchanged."""
    store = MemoryStore()
    app = create_app(store, KubeApiSettings(tokens=(TOKEN,)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind, "Accept": accept}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://paddock.test", headers=headers
    ) as client:
        json_type = {"Content-Type": "application/json"}
        for where, document in ((POOLS, pool()), (SANDBOXES, sandbox())):
            made = await client.post(where, json=document, headers=json_type | {"Accept": "*/*"})
            assert made.status_code == 201
        before = await everything(store)
        response = await client.request(method, path, content=body, params=query)
        after = await everything(store)
    await store.close()
    return response, before == after


@quick
@given(
    methods, paths, bodies, types, queries,
    st.sampled_from(["*/*", "application/json", "application/json;as=Table;v=v1;g=meta.k8s.io",
                     "text/html", "", ";;,=", "application/json;as=Nothing"]),
)  # fmt: skip
def test_garbage_never_breaks_the_api(method, path, body, kind, query, accept):
    try:
        httpx.URL("http://paddock.test").join(path.replace("\\", "/"))
    except httpx.InvalidURL:
        return  # no client could send that
    response, is_unchanged = asyncio.run(throw(method, path, body, kind, query, accept))
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert is_unchanged
        if method != "HEAD":
            assert response.json()["kind"] == "Status"
            assert response.json()["code"] == response.status_code
