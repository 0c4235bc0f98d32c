"""What must never happen, however requests race and machines fail."""

import asyncio
import base64
import json
from datetime import datetime
from typing import Any

import pytest
from msgspec import structs

from paddock.claims.caller import Caller, Role
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PaddockError,
    UnavailableError,
    UnsupportedError,
)
from paddock.resources.kinds.builtin import Secret
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.port import InstanceState
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

WANTED = NewSandbox(template="base")
BASE = Key("default", "base")


async def made(world: World, **changes) -> Sandbox:
    return await world.manager.claims.create(CALLER, structs.replace(WANTED, **changes))


def id_of(sandbox: Sandbox) -> str:
    assert sandbox.spec.claim is not None
    return sandbox.spec.claim.sandbox_id


async def test_refused_requests_do_not_use_up_the_stock() -> None:
    async with paddock(pool_size=3) as world:
        await world.stocked(3)
        for _ in range(3):
            body = {"templateID": "base", "metadata": {"label:team": "not a label value !"}}
            response = await world.http.post("/v2/sandboxes", json=body)
            assert response.status_code == 400
        assert len(world.plane.pool_members.members(BASE).available) == 3


async def test_stock_returns_after_the_store_was_unavailable() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        real = world.store.update

        async def away(obj, **_):
            raise UnavailableError("no answer")

        world.store.update = away
        with pytest.raises(PaddockError):
            await made(world, create_on_no_stock=False)
        world.store.update = real
        assert len(world.plane.pool_members.members(BASE).available) == 1


async def test_a_resume_that_takes_longer_than_the_timeout_loses_nothing() -> None:
    async with paddock() as world:
        sandbox = await made(world)
        await world.manager.lifecycle.pause(CALLER, id_of(sandbox))
        world.runtime.fail_node(is_down=True)
        resuming = asyncio.ensure_future(
            world.manager.lifecycle.resume(CALLER, id_of(sandbox), timeout_seconds=15)
        )
        await asyncio.sleep(40)
        world.runtime.fail_node(is_down=False)
        resumed = await resuming
        assert resumed.status.phase is Phase.RUNNING
        await asyncio.sleep(10)
        assert (
            await world.manager.queries.get(CALLER, id_of(sandbox))
        ).status.phase is Phase.RUNNING


async def test_a_timeout_set_while_paused_never_ends_a_paused_sandbox() -> None:
    async with paddock() as world:
        sandbox = await made(world)
        real = world.store.update

        async def slow(obj, **options):
            await asyncio.sleep(0.05)
            return await real(obj, **options)

        world.store.update = slow
        results = await asyncio.gather(
            world.manager.lifecycle.pause(CALLER, id_of(sandbox)),
            world.manager.lifecycle.set_timeout(CALLER, id_of(sandbox), timeout_seconds=60),
            return_exceptions=True,
        )
        assert all(isinstance(item, (Sandbox, NotFoundError)) for item in results)
        await asyncio.sleep(300)
        kept = await world.manager.queries.get(CALLER, id_of(sandbox))
        assert kept.spec.shutdown_time == kept.spec.retained_until


async def test_a_pause_without_memory_does_not_change_the_strategy() -> None:
    async with paddock() as world:
        sandbox = await made(world)
        for memory, state in ((False, InstanceState.STOPPED), (True, InstanceState.FROZEN)):
            await world.manager.lifecycle.pause(CALLER, id_of(sandbox), memory=memory)
            instance = await world.runtime.inspect(sandbox.metadata.uid)
            assert instance is not None
            assert instance.state is state
            await world.manager.lifecycle.connect(CALLER, id_of(sandbox), timeout_seconds=600)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UnsupportedError("cannot"), UnsupportedError),
        (PaddockError("dump failed"), UnavailableError),
    ],
)
async def test_a_failed_pause_leaves_the_sandbox_running_with_a_deadline(
    error: PaddockError, told: type[PaddockError]
) -> None:
    async with paddock() as world:
        sandbox = await made(world, timeout_seconds=400)

        async def refuse(uid: str):
            raise error

        world.runtime.freeze = refuse
        with pytest.raises(told, match=error.message):
            await world.manager.lifecycle.pause(CALLER, id_of(sandbox))
        # A client that is notified of it finds a running sandbox at once.
        await world.manager.lifecycle.set_timeout(CALLER, id_of(sandbox), timeout_seconds=400)
        await asyncio.sleep(60)
        running = await world.manager.queries.get(CALLER, id_of(sandbox))
        assert not running.spec.paused
        assert running.spec.shutdown_time is not None


async def test_hanging_node_operations_do_not_block_other_sandboxes() -> None:
    async with paddock(pool_size=0) as world:
        stuck = [await made(world, timeout_seconds=None) for _ in range(100)]
        uids = {sandbox.metadata.uid for sandbox in stuck}
        real = world.runtime.freeze

        async def hang(uid: str):
            return await (asyncio.Event().wait() if uid in uids else real(uid))

        world.runtime.freeze = hang
        began = asyncio.get_running_loop().time()
        pauses = [
            asyncio.ensure_future(world.manager.lifecycle.pause(CALLER, id_of(sandbox)))
            for sandbox in stuck
        ]
        await asyncio.sleep(1)
        async with asyncio.timeout(10):
            sound = await made(world)
            await world.manager.lifecycle.pause(CALLER, id_of(sound))
        for pause in pauses:
            with pytest.raises(PaddockError):
                await pause
        # Hanging reconciles time out, are retried, and succeed: the node works again.
        world.runtime.freeze = real
        await asyncio.sleep(began + 15 * 60 - 1 - asyncio.get_running_loop().time())
        assert {item.status.phase for item in seen(world, stuck)} == {Phase.RUNNING}
        await asyncio.sleep(30)
        assert {item.status.phase for item in seen(world, stuck)} == {Phase.PAUSED}


def seen(world: World, sandboxes: list[Sandbox]) -> list[Sandbox]:
    """Their current versions; all must exist."""
    found = [world.provider.sandbox(sandbox.key) for sandbox in sandboxes]
    there = [item for item in found if item is not None]
    assert len(there) == len(sandboxes)
    return there


async def test_another_teams_pool_cannot_be_claimed_by_name() -> None:
    async with paddock() as world:
        pool = SandboxPool(
            metadata=ObjectMeta(name="secret", namespace="alpha"),
            spec=SandboxPoolSpec(template=SandboxTemplateSpec(env={"TOKEN": "x"}), replicas=1),
        )
        await world.provider.write.create(pool)
        with pytest.raises(NotFoundError):
            await world.manager.claims.create(Caller("beta"), NewSandbox(template="alpha/secret"))
        await world.manager.claims.create(Caller("alpha"), NewSandbox(template="secret"))


async def test_a_reader_does_not_get_the_access_token() -> None:
    async with paddock() as world:
        sandbox = await made(world)
        _, reader = await world.plane.keyring.create(name="eyes", role=Role.READER)
        path = f"/sandboxes/{id_of(sandbox)}"
        assert "envdAccessToken" in (await world.http.get(path)).json()
        shown = await world.http.get(path, headers={"X-API-Key": reader})
        assert shown.status_code == 200
        assert "envdAccessToken" not in shown.json()


async def test_resource_overrides_may_lower_limits_and_never_raise_them() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        small = await made(world, resources=Resources(cpu="500m"))
        assert small.spec.resources == Resources(cpu="500m", memory="1Gi", disk="10Gi", pids=4096)
        for size in ("0", "64"):
            with pytest.raises(InvalidError):
                await made(world, resources=Resources(cpu=size))


async def test_reserved_labels_cannot_be_set_through_metadata() -> None:
    async with paddock() as world:
        body = {"templateID": "base", "metadata": {"label:paddock.dev/claim": "victim"}}
        assert (await world.http.post("/v2/sandboxes", json=body)).status_code == 400


async def test_the_same_idempotency_key_for_another_request_is_a_conflict() -> None:
    async with paddock() as world:
        await made(world, idempotency_key="once")
        with pytest.raises(ConflictError):
            await made(world, idempotency_key="once", timeout_seconds=60)


async def test_a_resume_whose_write_failed_does_not_use_up_the_quota() -> None:
    async with paddock() as world:
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.RUNNING, 1)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))
        sandbox = await made(world)
        await world.manager.lifecycle.pause(CALLER, id_of(sandbox))
        real = world.store.update

        async def away(obj, **_):
            raise UnavailableError("no answer")

        world.store.update = away
        with pytest.raises(UnavailableError):
            await world.manager.lifecycle.connect(CALLER, id_of(sandbox), timeout_seconds=60)
        world.store.update = real
        await world.within_quota(lambda: made(world))


async def test_an_admin_cannot_revoke_an_operators_key_nor_leave_its_own_quota() -> None:
    async with paddock() as world:
        quota = Quota((QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 1),))
        admin, plain = await world.plane.keyring.create(name="one", role=Role.ADMIN, quota=quota)
        headers = {"X-API-Key": plain}
        keys = (await world.http.get("/api-keys")).json()
        operator = next(key["id"] for key in keys if key["role"] == "operator")
        refused = await world.http.delete(f"/api-keys/{operator}", headers=headers)
        assert refused.status_code == 403
        raised = {"quota": {"limits": []}}
        refused = await world.http.patch(f"/api-keys/{admin.id}", json=raised, headers=headers)
        assert refused.status_code == 403
        minted = await world.http.post("/api-keys", json={"name": "two"}, headers=headers)
        assert minted.status_code == 403
        assert "a key with a quota cannot create keys" in minted.json()["message"]
        _, free = await world.plane.keyring.create(name="free", role=Role.ADMIN)
        minted = await world.http.post(
            "/api-keys", json={"name": "three"}, headers={"X-API-Key": free}
        )
        assert minted.status_code == 201


@pytest.mark.parametrize(
    "quota",
    [
        {"limit": [{"dimension": "sandbox.count", "scope": "all", "limit": 1}]},
        {"limits": [{"dimension": "sandbox.count", "scope": "all", "limit": 1, "per": "day"}]},
        {},
    ],
)
async def test_a_misspelt_quota_is_refused_with_its_path(quota: dict[str, Any]) -> None:
    async with paddock() as world:
        key, _ = await world.plane.keyring.create(name="one")
        for method, path, extra in (
            ("POST", "/api-keys", {"name": "k"}),
            ("PATCH", f"/api-keys/{key.id}", {}),
            ("PATCH", "/teams/default", {}),
        ):
            refused = await world.http.request(method, path, json={**extra, "quota": quota})
            assert refused.status_code == 400
            assert refused.json()["message"].startswith("quota")


async def test_a_stored_quota_with_fields_of_another_version_is_readable() -> None:
    async with paddock() as world:
        key, _ = await world.plane.keyring.create(name="one")
        stored = await world.store.get(Secret, Key(world.plane.keyring.namespace, key.id))
        record = json.loads(base64.b64decode(stored.data["record"]))
        limit = {"dimension": "sandbox.count", "scope": "all", "limit": 4, "later": True}
        record["quota"] = {"limits": [limit], "later": 1}
        data = {"record": base64.b64encode(json.dumps(record).encode()).decode()}
        await world.store.update(structs.replace(stored, data=data))
        wanted = Quota((QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 4),))
        await world.until(lambda: world.plane.keyring.key(key.id).quota == wanted)


async def test_no_sandbox_outlives_the_maximum_timeout_of_the_installation() -> None:
    async with paddock(max_timeout_seconds=60) as world:
        for metadata in (
            {"paddock.dev/never-timeout": "true"},
            {"e2b.agents.kruise.io/never-timeout": "true"},
        ):
            body = {"templateID": "base", "metadata": metadata}
            refused = await world.http.post("/v2/sandboxes", json={**body, "timeout": 60})
            assert refused.status_code == 400
            assert "never-timeout" in refused.json()["message"]
        made = await world.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 60})
        path = f"/sandboxes/{made.json()['sandboxID']}/refreshes"
        assert (await world.http.post(path, json={"duration": 61})).status_code == 400
        assert (await world.http.post(path, json={"duration": 60})).status_code == 204


async def test_only_an_operator_changes_shared_templates() -> None:
    async with paddock() as world:
        change = {"public": False}
        for role in (Role.MEMBER, Role.ADMIN):
            _, plain = await world.plane.keyring.create(name="one", team="default", role=role)
            headers = {"X-API-Key": plain}
            hidden = await world.http.patch("/templates/base", json=change, headers=headers)
            deleted = await world.http.delete("/templates/base", headers=headers)
            assert (hidden.status_code, deleted.status_code) == (403, 403)
        hidden = await world.http.patch("/templates/base", json={"public": False})
        assert hidden.status_code == 200


async def test_writing_a_keys_last_use_undoes_no_change_and_revives_no_key() -> None:
    async with paddock() as world:
        keyring = world.plane.keyring
        key, plain = await keyring.create(name="busy")
        keyring.authenticate(plain)
        quota = Quota((QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 3),))
        await asyncio.gather(keyring.update_key(key.id, quota=quota), keyring.flush_last_used())
        assert keyring.key(key.id).quota == quota
        keyring.authenticate(plain)
        await asyncio.gather(keyring.revoke(key.id), keyring.flush_last_used())
        with pytest.raises(PaddockError):
            keyring.authenticate(plain)


async def test_a_keys_last_use_is_reported_before_it_is_written() -> None:
    async with paddock() as world:
        keyring = world.plane.keyring
        key, plain = await keyring.create(name="busy")

        def told() -> datetime | None:
            return next(item.last_used for item in keyring.listed() if item.id == key.id)

        assert told() is None
        for seconds in (0, 10, 100):
            await asyncio.sleep(seconds)
            keyring.authenticate(plain)
            await keyring.flush_last_used()
            assert told() == keyring.clock.now()


async def test_an_unavailable_store_stops_no_background_work() -> None:
    async with paddock() as world:
        keyring = world.plane.keyring
        key, plain = await keyring.create(name="busy")
        keyring.authenticate(plain)
        real = world.store.update

        async def away(obj, **_):
            raise UnavailableError("no answer")

        world.store.update = away
        await keyring.flush_last_used()
        assert keyring.key(key.id).last_used is None
        world.store.update = real
        await keyring.flush_last_used()
        assert keyring.key(key.id).last_used is not None
