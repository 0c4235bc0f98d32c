"""No request of an API key weakens what the system or an operator decided. Simulated runtime."""

from typing import Any

import httpx
import pytest

from paddock.claims.caller import Role
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key, Resource
from paddock.resources.network.internet import Internet
from paddock.resources.registry import ALL
from tests.scenario.paddock import World, paddock
from tests.security.battery.weakening import KINDS, Attempt, attempts, merged, nested

pytestmark = pytest.mark.looptime
API = "/apis/paddock.dev/v1alpha1/namespaces/red"
CLASSES = {info.cls.PLURAL: info.cls for info in ALL}
TYPES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
    "replace": "application/json",
}


async def set_up(world: World, client: httpx.AsyncClient) -> dict[str, str]:
    """Create an object of every kind with the key; return their names."""
    plain: dict[str, Any] = {"templateName": "base", "replicas": 1}
    for kind, name, spec in (
        ("sandboxclaims", "c", plain),
        ("sandboxtemplates", "t", {"public": False}),
        ("sandboxpools", "p", {"replicas": 1, "template": {}}),
        ("batchsandboxes", "b", {"replicas": 1, "template": {}}),
    ):
        made = await client.post(f"{API}/{kind}", json={"metadata": {"name": name}, "spec": spec})
        assert made.status_code == 201, made.text

    def claimed() -> list[Sandbox]:
        found = world.provider.all(Sandbox)
        return [item for item in found if item.spec.claim and item.spec.claim.claim_uid]

    await world.until(lambda: len(claimed()) == 1)
    box = claimed()[0].metadata.name
    made = await client.post(
        f"{API}/checkpoints", json={"metadata": {"name": "k"}, "spec": {"sandboxName": box}}
    )
    assert made.status_code == 201, made.text
    names = {"sandboxclaims": "c", "sandboxtemplates": "t", "sandboxpools": "p"}
    return names | {"batchsandboxes": "b", "checkpoints": "k", "sandboxes": box}


async def request(client: httpx.AsyncClient, attempt: Attempt, name: str) -> httpx.Response:
    url = f"{API}/{attempt.kind}/{name}"
    headers = {"Content-Type": TYPES[attempt.way]}
    document: Any = nested(attempt.path, attempt.value)
    if attempt.way == "replace":
        live = (await client.get(url)).json()
        return await client.put(url, json=merged(live, document), headers=headers)
    if attempt.way == "json":
        document = [{"op": "add", "path": f"/{attempt.path}", "value": attempt.value}]
    if attempt.way == "apply":
        identity = {"apiVersion": "paddock.dev/v1alpha1", "kind": CLASSES[attempt.kind].KIND}
        document = merged(document, identity)
        url += "?fieldManager=attacker&force=true"
    return await client.patch(url, json=document, headers=headers)


def decided(obj: Resource) -> dict[str, Any]:
    """Return what no request may change: all but the status, which controllers write."""
    plain = codec.to_builtins(obj)
    meta = plain["metadata"]
    kept = ("labels", "annotations", "finalizers", "ownerReferences", "uid")
    meta = {name: meta.get(name) for name in kept}
    owners = "paddock.dev/field-managers"
    meta["annotations"] = {k: v for k, v in (meta["annotations"] or {}).items() if k != owners}
    return {"metadata": meta, "spec": plain["spec"]}


async def test_every_attempt_to_weaken_leaves_the_object_as_it_is() -> None:
    limit = Quota((QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 3),))
    async with paddock(max_timeout_seconds=30 * 24 * 3600) as world:
        await world.plane.keyring.set_team_quota("red", limit)
        await world.plane.keyring.set_team_internet("red", Internet.REGISTRIES)
        _, plain = await world.plane.keyring.create(name="k", team="red", role=Role.ADMIN)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=world.plane.declarative_api),
            base_url="http://paddock",
            headers={"Authorization": f"Bearer {plain}"},
        ) as client:
            world.plane.logins.calls.take = lambda *_: None  # the rate is not under test
            names = await set_up(world, client)
            await world.until(lambda: world.plane.ledger.is_pending("team:red") is False)
            codes: dict[int, int] = {}
            for attempt in attempts():
                key = Key("red", names[attempt.kind])
                before = decided(await world.store.get(CLASSES[attempt.kind], key))
                response = await request(client, attempt, names[attempt.kind])
                after = decided(await world.store.get(CLASSES[attempt.kind], key))
                assert after == before, (attempt, response.status_code, response.text)
                assert response.status_code < 500, (attempt, response.text)
                codes[response.status_code] = codes.get(response.status_code, 0) + 1
            assert set(names) == set(KINDS)
            assert sum(codes.values()) > 500, codes
            used = world.plane.ledger.used("team:red", Dimension.COUNT, QuotaScope.ALL)
            assert used <= 3
