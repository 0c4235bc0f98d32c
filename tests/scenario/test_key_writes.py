"""API keys that write by the declarative API: quotas and ceilings hold. Simulated runtime."""

import contextlib
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import httpx
import pytest

from paddock.claims.caller import Role
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.kit.clock import LoopClock, rfc3339
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.meta import Key
from paddock.resources.network.internet import Internet
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime
RED = "/apis/paddock.dev/v1alpha1/namespaces/red"
SHARED = "/apis/paddock.dev/v1alpha1/namespaces/default"
KINDS = ("sandboxclaims", "sandboxtemplates", "sandboxpools", "checkpoints", "batchsandboxes",
         "sandboxenvs", "sandboxes")  # fmt: skip
TOKEN = {"Authorization": "Bearer token"}


def count(most: int, scope: QuotaScope = QuotaScope.ALL) -> Quota:
    return Quota((QuotaLimit(Dimension.COUNT, scope, most),))


@contextlib.asynccontextmanager
async def calling(
    world: World, role: Role = Role.ADMIN, **options: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """Yield a client of the declarative API with a new key of team `red`."""
    _, plain = await world.plane.keyring.create(name="k", team="red", role=role, **options)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=world.plane.declarative_api),
        base_url="http://paddock",
        headers={"Authorization": f"Bearer {plain}", "X-API-Key": plain},
    ) as client:
        yield client


def body(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec}


def claim(name: str = "c", **spec: Any) -> dict[str, Any]:
    return body(name, templateName="base", claimTimeoutSeconds=5, **spec)


def pool(name: str = "p", replicas: int = 2, **template: Any) -> dict[str, Any]:
    return body(name, replicas=replicas, template=template)


def of_red(world: World) -> list[Sandbox]:
    """Return the sandboxes that team `red` has."""
    return [
        item
        for item in world.provider.all(Sandbox)
        if item.spec.claim is not None and item.spec.claim.owner == "red"
    ]


async def finished(world: World, name: str = "c") -> SandboxClaim:
    def found() -> SandboxClaim | None:
        return world.provider.get(SandboxClaim, Key("red", name))

    await world.until(lambda: (item := found()) is not None and item.status.phase.is_final)
    done = found()
    assert done is not None
    return done


@pytest.mark.parametrize(
    ("role", "creates", "updates"),
    [
        (Role.READER, set(), set()),
        (
            Role.MEMBER,
            {"sandboxclaims", "batchsandboxes", "checkpoints"},
            {"sandboxclaims", "batchsandboxes", "checkpoints", "sandboxes"},
        ),
        (
            Role.ADMIN,
            set(KINDS) - {"sandboxes", "sandboxenvs"},
            set(KINDS) - {"sandboxenvs"},
        ),
    ],
)
async def test_each_role_writes_its_kinds_in_its_own_namespace_only_and_can_i_says_so(
    role: Role, creates: set[str], updates: set[str]
) -> None:
    async with paddock() as world, calling(world, role) as client:
        for kind in KINDS:
            for verb, method, suffix, allowed in (
                ("create", "POST", "", creates),
                ("update", "PUT", "/none", updates),
                ("patch", "PATCH", "/none", updates),
            ):
                for namespace in ("red", "blue", "default"):
                    is_own = namespace == "red" or (
                        namespace == "default" and kind in ("sandboxes", "checkpoints")
                    )
                    expected = kind in allowed and is_own
                    response = await client.request(
                        method,
                        f"/apis/paddock.dev/v1alpha1/namespaces/{namespace}/{kind}{suffix}",
                        json={"metadata": {"name": ""}},
                        headers={
                            "Content-Type": "application/merge-patch+json"
                            if verb == "patch"
                            else "application/json"
                        },
                    )
                    is_right_missing = "this key may not " + verb in response.text
                    assert is_right_missing is not expected, (kind, verb, namespace, response.text)
                    assert response.status_code < 500
                    asked = {"verb": verb, "group": "paddock.dev", "resource": kind}
                    review = await client.post(
                        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                        json={"spec": {"resourceAttributes": {**asked, "namespace": namespace}}},
                    )
                    assert review.json()["status"]["allowed"] is expected


@pytest.mark.parametrize("is_of_key", [True, False])
async def test_a_claim_stays_within_the_quota_of_team_and_key(is_of_key: bool) -> None:
    async with paddock() as world:
        quota = count(2)
        if not is_of_key:
            await world.plane.keyring.set_team_quota("red", quota)
        async with calling(world, Role.MEMBER, quota=quota if is_of_key else None) as client:
            response = await client.post(f"{RED}/sandboxclaims", json=claim(replicas=5))
            assert response.status_code == 201, response.text
            done = await finished(world)
            assert done.status.claimed_replicas == 2
            assert "2 of 2" in done.status.message
            assert len(of_red(world)) == 2
            more = await world.http.post(
                "/v2/sandboxes", json={"templateID": "base"}, headers=client.headers
            )
            assert more.status_code == 429


async def test_a_claim_keeps_its_key_whoever_changes_it() -> None:
    async with paddock() as world, calling(world, Role.MEMBER) as client:
        made = (await client.post(f"{RED}/sandboxclaims", json=claim(replicas=1))).json()
        key_id = made["metadata"]["annotations"]["paddock.dev/key-id"]
        done = await finished(world)
        [sandbox] = of_red(world)
        assert sandbox.spec.claim is not None
        assert sandbox.spec.claim.key_id == key_id
        async with calling(world, Role.MEMBER) as other:
            path = f"{RED}/sandboxclaims/c"
            replaced = await other.put(path, json=claim(replicas=1, ttlSecondsAfterCompleted=60))
            assert replaced.status_code == 200, replaced.text
            assert replaced.json()["metadata"]["annotations"]["paddock.dev/key-id"] == key_id
            for changes in (
                {"metadata": {"annotations": {"paddock.dev/key-id": None}}},
                {"status": {"phase": "Claiming"}},
            ):
                kept = await other.patch(
                    path, json=changes, headers={"Content-Type": "application/merge-patch+json"}
                )
                assert kept.json()["metadata"]["annotations"]["paddock.dev/key-id"] == key_id
            assert done.status.phase.is_final


async def test_pools_and_claims_together_stay_within_the_quota() -> None:
    async with paddock() as world:
        await world.plane.keyring.set_team_quota("red", count(5))
        async with calling(world) as client:
            refused = await client.post(f"{RED}/sandboxpools", json=pool("p", 6))
            assert refused.status_code == 429
            assert "team red has 0 of 5" in refused.json()["message"]
            made = await client.post(f"{RED}/sandboxpools", json=pool("p", 3))
            assert made.status_code == 201, made.text
            again = await client.post(f"{RED}/sandboxpools", json=pool("q", 3))
            assert again.status_code == 429
            tried = await client.post(f"{RED}/sandboxpools?dryRun=All", json=pool("q", 2))
            assert tried.status_code == 201
            body = {"metadata": {"name": "x"}, "spec": {"templateName": "p", "replicas": 5}}
            body["spec"]["claimTimeoutSeconds"] = 5
            assert (await client.post(f"{RED}/sandboxclaims", json=body)).status_code == 201
            done = await finished(world, "x")
            assert done.status.claimed_replicas == 2
            unclaimed = [
                item
                for item in world.provider.all(Sandbox)
                if item.metadata.namespace == "red" and item.spec.claim is None
            ]
            assert len(unclaimed) + len(of_red(world)) <= 5
            for path, change in (
                ("sandboxpools/p", {"spec": {"replicas": 4}}),
                ("sandboxpools/p/scale", {"spec": {"replicas": 4}}),
            ):
                grown = await client.patch(
                    f"{RED}/{path}",
                    json=change,
                    headers={"Content-Type": "application/merge-patch+json"},
                )
                assert grown.status_code == 429, path
            assert (await client.delete(f"{RED}/sandboxpools/p")).status_code == 200
            await world.until(lambda: world.provider.get(SandboxPool, Key("red", "p")) is None)
            made = await client.post(f"{RED}/sandboxpools", json=pool("q", 3))
            assert made.status_code == 201, made.text


async def test_a_key_with_a_quota_does_not_grow_the_pool_of_another_key() -> None:
    async with paddock() as world, calling(world) as creator:
        assert (await creator.post(f"{RED}/sandboxpools", json=pool("p", 1))).status_code == 201
        async with calling(world, quota=count(1)) as limited:
            for path in ("sandboxpools/p", "sandboxpools/p/scale"):
                grown = await limited.patch(
                    f"{RED}/{path}",
                    json={"spec": {"replicas": 3}},
                    headers={"Content-Type": "application/merge-patch+json"},
                )
                assert grown.status_code == 429, path
                assert "quota of its own" in grown.json()["message"]
        found = world.provider.get(SandboxPool, Key("red", "p"))
        assert found is not None
        assert found.spec.replicas == 1


async def test_a_batch_counts_as_a_whole_and_once() -> None:
    async with paddock() as world:
        await world.plane.keyring.set_team_quota("red", count(4))
        async with calling(world, Role.MEMBER) as client:
            refused = await client.post(
                f"{RED}/batchsandboxes", json=body("b", replicas=5, template={})
            )
            assert refused.status_code == 429, refused.text
            made = await client.post(
                f"{RED}/batchsandboxes", json=body("b", replicas=3, template={})
            )
            assert made.status_code == 201, made.text
            await world.until(lambda: len(of_red(world)) == 3)
            used = world.plane.ledger.used("team:red", Dimension.COUNT, QuotaScope.ALL)
            assert used == 3
            codes = [
                (
                    await world.http.post(
                        "/v2/sandboxes", json={"templateID": "base"}, headers=client.headers
                    )
                ).status_code
                for _ in range(2)
            ]
            assert codes == [201, 429]
            grown = await client.patch(
                f"{RED}/batchsandboxes/b/scale",
                json={"spec": {"replicas": 4}},
                headers={"Content-Type": "application/merge-patch+json"},
            )
            assert grown.status_code == 429
            assert (await client.delete(f"{RED}/batchsandboxes/b")).status_code == 200
            await world.until(lambda: len(of_red(world)) == 1)
            used = world.plane.ledger.used("team:red", Dimension.COUNT, QuotaScope.ALL)
            assert used == 1


async def test_a_restarted_control_plane_counts_pools_and_batches_again() -> None:
    store = MemoryStore(clock=LoopClock())
    async with paddock(store=store) as world:
        await world.plane.keyring.set_team_quota("red", count(5))
        async with calling(world) as client:
            for path, document in (
                ("sandboxpools", pool("p", 2)),
                ("batchsandboxes", body("b", replicas=2, template={})),
            ):
                made = await client.post(f"{RED}/{path}", json=document)
                assert made.status_code == 201, made.text
            await world.until(lambda: len(of_red(world)) == 2)
    async with paddock(store=store) as world:
        used = world.plane.ledger.used("team:red", Dimension.COUNT, QuotaScope.ALL)
        assert used == 4


async def test_a_resume_by_patch_is_refused_beyond_the_quota() -> None:
    async with paddock() as world:
        await world.plane.keyring.set_team_quota("red", count(1, QuotaScope.RUNNING))
        async with calling(world, Role.MEMBER) as client:
            made = await world.http.post(
                "/v2/sandboxes", json={"templateID": "base"}, headers=client.headers
            )
            assert made.status_code == 201, made.text
            [sandbox] = of_red(world)
            path = f"{SHARED}/sandboxes/{sandbox.metadata.name}"

            async def patch(**spec: Any) -> httpx.Response:
                headers = {"Content-Type": "application/merge-patch+json"}
                return await client.patch(path, json={"spec": spec}, headers=headers)

            assert (await patch(paused=True)).status_code == 200

            def phase() -> Phase:
                found = world.provider.sandbox(sandbox.key)
                assert found is not None
                return found.status.phase

            await world.until(lambda: phase() is Phase.PAUSED)
            other = await world.http.post(
                "/v2/sandboxes", json={"templateID": "base"}, headers=client.headers
            )
            assert other.status_code == 201
            refused = await patch(paused=False)
            assert refused.status_code == 429, refused.text
            assert phase() is Phase.PAUSED
            url = f"/sandboxes/{other.json()['sandboxID']}"
            await world.http.delete(url, headers=client.headers)
            assert (await patch(paused=False)).status_code == 200
            await world.until(lambda: phase() is Phase.RUNNING)
            resumed = world.provider.sandbox(sandbox.key)
            assert resumed is not None
            assert resumed.spec.shutdown_time is not None


async def test_a_key_gives_its_sandbox_no_later_end_than_the_installation_allows() -> None:
    async with paddock(max_timeout_seconds=3600) as world, calling(world, Role.MEMBER) as client:
        refused = await client.post(f"{RED}/sandboxclaims", json=claim())
        assert refused.status_code == 403
        assert "spec.shutdownTime" in refused.json()["message"]
        now = world.plane.clock.now()
        soon, late = (rfc3339(now + timedelta(seconds=seconds)) for seconds in (1800, 7200))
        refused = await client.post(f"{RED}/sandboxclaims", json=claim(shutdownTime=late))
        assert refused.status_code == 403
        assert (
            await client.post(f"{RED}/sandboxclaims", json=claim(shutdownTime=soon))
        ).status_code == 201
        await finished(world)
        [sandbox] = of_red(world)
        for end in (late, None):
            answer = await client.patch(
                f"{RED}/sandboxes/{sandbox.metadata.name}",
                json={"spec": {"shutdownTime": end}},
                headers={"Content-Type": "application/merge-patch+json"},
            )
            assert answer.status_code == 403, answer.text


async def test_a_template_of_a_key_opens_nothing_that_team_or_operator_close() -> None:
    async with paddock() as world:
        await world.plane.keyring.set_team_internet("red", Internet.CLOSED)
        async with calling(world) as client:
            open_ = body("t", public=False, network={"allowOut": ["example.com"]})
            refused = await client.post(f"{RED}/sandboxtemplates", json=open_)
            assert refused.status_code == 403
            assert "spec.network.allowOut[0]" in refused.json()["message"]
            plain = body("t", public=False)
            assert (await client.post(f"{RED}/sandboxtemplates", json=plain)).status_code == 201
            for type_, change in (
                ("merge-patch+json", {"spec": {"network": {"allowPrivateNetworks": True}}}),
                (
                    "json-patch+json",
                    [{"op": "add", "path": "/spec/volumes", "value": [
                        {"name": "v", "mountPath": "/v", "hostPath": "/etc"}]}],
                ),
                ("strategic-merge-patch+json", {"spec": {"podTemplate": {"spec": {}}}}),
                (
                    "apply-patch+yaml",
                    {"apiVersion": "paddock.dev/v1alpha1", "kind": "SandboxTemplate",
                     "metadata": {"name": "t"}, "spec": {"outbound": {"httpProxy": "http://x"}}},
                ),
            ):  # fmt: skip
                answer = await client.patch(
                    f"{RED}/sandboxtemplates/t?fieldManager=me",
                    json=change,
                    headers={"Content-Type": f"application/{type_}"},
                )
                assert answer.status_code == 403, (type_, answer.text)


async def test_apply_creates_nothing_that_the_key_may_not_create() -> None:
    async with paddock() as world, calling(world, Role.ADMIN) as client:
        for kind, path in (("Sandbox", "sandboxes"), ("SandboxEnv", "sandboxenvs")):
            document = {"apiVersion": "paddock.dev/v1alpha1", "kind": kind,
                        "metadata": {"name": "x"}, "spec": {}}  # fmt: skip
            answer = await client.patch(
                f"{RED}/{path}/x?fieldManager=me",
                json=document,
                headers={"Content-Type": "application/apply-patch+yaml"},
            )
            assert answer.status_code == 403, answer.text
        document = {"apiVersion": "paddock.dev/v1alpha1", "kind": "SandboxClaim",
                    "metadata": {"name": "c"}, "spec": {"templateName": "base"}}  # fmt: skip
        for code in (201, 200):
            answer = await client.patch(
                f"{RED}/sandboxclaims/c?fieldManager=me",
                json=document,
                headers={"Content-Type": "application/apply-patch+yaml"},
            )
            assert answer.status_code == code, answer.text


async def test_a_key_checkpoints_its_own_sandbox_and_no_other() -> None:
    async with paddock() as world, calling(world, Role.MEMBER) as client:
        await world.http.post("/v2/sandboxes", json={"templateID": "base"}, headers=client.headers)
        await world.http.post("/v2/sandboxes", json={"templateID": "base"})
        [own] = of_red(world)
        [other] = [
            item
            for item in world.provider.all(Sandbox)
            if item.spec.claim is not None and item.spec.claim.owner == "default"
        ]
        refused = await client.post(
            f"{SHARED}/checkpoints", json=body("bad", sandboxName=other.metadata.name)
        )
        assert refused.status_code == 403
        made = await client.post(
            f"{SHARED}/checkpoints", json=body("good", sandboxName=own.metadata.name)
        )
        assert made.status_code == 201, made.text
        assert made.json()["spec"]["owner"] == "red"
        await world.until(
            lambda: (
                (found := world.provider.get(Checkpoint, Key("default", "good"))) is not None
                and found.status.phase == "Succeeded"
            )
        )


async def test_a_sandbox_of_another_team_in_the_own_namespace_is_not_shown() -> None:
    """A team that requests from a public template of another namespace has its sandbox there."""
    async with paddock() as world, calling(world) as client:
        operator = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=world.plane.declarative_api),
            base_url="http://paddock",
            headers=TOKEN,
        )
        async with operator:
            made = await operator.post(f"{RED}/sandboxtemplates", json=body("open", public=True))
            assert made.status_code == 201, made.text
        made = await world.http.post("/v2/sandboxes", json={"templateID": "red/open"})
        assert made.status_code == 201, made.text
        await world.until(
            lambda: any(item.metadata.namespace == "red" for item in world.provider.all(Sandbox))
        )
        listed = (await client.get(f"{RED}/sandboxes")).json()["items"]
        assert listed == []


async def test_a_team_does_not_replace_a_shared_template_for_claims_of_others() -> None:
    async with paddock() as world, calling(world, Role.MEMBER) as client:
        operator = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=world.plane.declarative_api),
            base_url="http://paddock",
            headers=TOKEN,
        )
        async with operator:
            path = "/apis/paddock.dev/v1alpha1/namespaces/aaa/sandboxtemplates"
            made = await operator.post(path, json=body("base", public=True, env={"A": "bait"}))
            assert made.status_code == 201, made.text
        await client.post(f"{RED}/sandboxclaims", json=claim(replicas=1))
        await finished(world)
        [sandbox] = of_red(world)
        assert sandbox.spec.template is not None
        assert "A" not in sandbox.spec.template.env


async def test_keys_create_a_limited_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.api.kube.key_writes.writer.MAX_OBJECTS", 2)
    async with paddock() as world, calling(world) as client:
        codes = [
            (
                await client.post(f"{RED}/sandboxtemplates", json=body(f"t{at}", public=False))
            ).status_code
            for at in range(3)
        ]
        assert codes == [201, 201, 429]
