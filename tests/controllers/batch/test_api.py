"""Batches through the API: many sandboxes with one call, shards as normal sandboxes."""

import pytest

from paddock.claims.caller import Caller, Role
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.resources.kinds.batch import BatchPhase
from paddock.resources.kinds.pool import RecycleStrategy, RecycleType
from paddock.resources.kinds.sandbox import LABEL_BATCH, LABEL_SHARD
from paddock.resources.meta import Key
from tests.controllers.batch.make import batch, batching, pool
from tests.scenario.paddock import paddock

pytestmark = pytest.mark.looptime

ROUTE = "/v2/sandboxes:batch"


async def test_one_call_creates_many_sandboxes() -> None:
    async with paddock(pool_size=5) as world:
        await world.stocked(5)
        answer = await world.http.post(ROUTE, json={"templateID": "base", "count": 8})
        assert answer.status_code == 201, answer.text
        body = answer.json()
        assert (body["requested"], body["created"]) == (8, 8)
        assert len({item["sandbox"]["sandboxID"] for item in body["results"]}) == 8
        assert [item["index"] for item in body["results"]] == list(range(8))


async def test_the_same_call_again_finds_the_same_sandboxes() -> None:
    async with paddock(pool_size=3) as world:
        wanted = {"templateID": "base", "count": 4}
        headers = {"Idempotency-Key": "once"}
        first = (await world.http.post(ROUTE, json=wanted, headers=headers)).json()
        second = (await world.http.post(ROUTE, json=wanted, headers=headers)).json()
        assert [item["sandbox"]["sandboxID"] for item in first["results"]] == [
            item["sandbox"]["sandboxID"] for item in second["results"]
        ]


async def test_sandboxes_that_could_not_be_created_are_named() -> None:
    async with paddock(pool_size=3) as world:
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 2)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))
        answer = await world.http.post(ROUTE, json={"templateID": "base", "count": 5})
        assert answer.status_code == 201
        body = answer.json()
        assert body["created"] == 2
        errors = [item["error"] for item in body["results"] if "error" in item]
        assert len(errors) == 3
        assert all("2 of 2" in error["message"] for error in errors), errors
        nothing = await world.http.post(ROUTE, json={"templateID": "base", "count": 5})
        assert nothing.status_code == 429


@pytest.mark.parametrize("count", [0, -1, 100_000, "many"])
async def test_an_invalid_count_is_refused(count) -> None:
    async with paddock(pool_size=0) as world:
        answer = await world.http.post(ROUTE, json={"templateID": "base", "count": count})
        assert answer.status_code == 400
        assert "count" in answer.json()["message"]


async def test_a_shard_is_a_normal_sandbox_once_it_is_addressed() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=2, most=10))
        await batches.create(batch("b", 2, pool_ref="p", owner="default"))
        await batches.ready("b")
        item = batches.get("b").status.allocations[1]
        before = world.provider.sandbox(Key("default", item.sandbox))
        assert before is not None
        assert before.spec.claim is None
        answer = await world.http.get(f"/sandboxes/{item.sandbox_id}")
        assert answer.status_code == 200, answer.text
        after = world.provider.sandbox(Key("default", item.sandbox))
        assert after is not None
        assert after.metadata.labels[LABEL_BATCH] == "b"
        assert after.metadata.labels[LABEL_SHARD] == "1"
        assert world.runtime.agent(item.uid).access_token == answer.json()["envdAccessToken"]
        assert batches.held("b")[1] == item.uid
        paused = await world.http.post(f"/sandboxes/{item.sandbox_id}/pause")
        assert paused.status_code == 204
        await batches.delete("b")
        assert (await world.http.get(f"/sandboxes/{item.sandbox_id}")).status_code == 404


async def test_a_shard_of_another_team_is_not_found() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=10))
        await batches.create(batch("b", 1, pool_ref="p", owner="others"))
        await batches.ready("b")
        item = batches.get("b").status.allocations[0]
        stranger = Caller("strangers", "", Role.MEMBER)
        assert await world.manager.batches.materialize_claim(item.sandbox_id, stranger) is None
        sandbox = world.provider.sandbox(Key("default", item.sandbox))
        assert sandbox is not None
        assert sandbox.spec.claim is None


async def test_gateways_find_a_shard_by_its_id() -> None:
    async with batching() as (world, batches):
        await batches.create(pool("p", buffer=0, most=10))
        await batches.create(batch("b", 1, pool_ref="p"))
        await batches.ready("b")
        item = batches.get("b").status.allocations[0]
        answer = await world.http.get(
            f"/_paddock/sandboxes/{item.sandbox_id}", headers={"Authorization": "Bearer token"}
        )
        assert answer.status_code == 200
        assert answer.json()["spec"]["claim"]["sandboxId"] == item.sandbox_id


async def test_an_addressed_shard_is_reused_without_its_claim() -> None:
    async with batching() as (world, batches):
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await batches.create(pool("p", buffer=1, most=1, recycle_strategy=strategy))
        await batches.create(batch("one", 1, pool_ref="p"))
        await batches.ready("one")
        item = batches.get("one").status.allocations[0]
        await world.http.get(f"/sandboxes/{item.sandbox_id}")
        await batches.delete("one")
        await batches.create(batch("two", 1, pool_ref="p"))
        await batches.ready("two")
        assert batches.held("two") == {0: item.uid}
        assert batches.get("two").status.phase is BatchPhase.RUNNING
        sandbox = world.provider.sandbox(Key("default", item.sandbox))
        assert sandbox is not None
        assert sandbox.spec.claim is None
        assert LABEL_BATCH not in sandbox.metadata.labels
