"""Checkpoints: owner, lifetime, and sandboxes created from them."""

import asyncio

import pytest

from paddock.claims.caller import Caller, Role
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import NotFoundError
from paddock.manager.sandboxes.snapshots import FORK_TTL_SECONDS
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase, CheckpointSpec
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import (
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import ObjectMeta
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime


def id_of(sandbox: Sandbox | None) -> str:
    assert sandbox is not None
    assert sandbox.spec.claim is not None
    return sandbox.spec.claim.sandbox_id


async def a_sandbox(world: World) -> Sandbox:
    return await world.manager.claims.create(
        CALLER, NewSandbox(template="base", timeout_seconds=None)
    )


async def test_a_snapshot_is_visible_to_its_team_only() -> None:
    async with paddock() as world:
        stored = await world.manager.snapshots.create(
            CALLER, id_of(await a_sandbox(world)), name="mine"
        )
        stranger = Caller("strangers")
        for reference in ("mine", stored.status.checkpoint_id, "default/mine"):
            with pytest.raises(NotFoundError):
                await world.manager.claims.create(stranger, NewSandbox(template=reference))
            with pytest.raises(NotFoundError):
                await world.manager.templates.delete(stranger, reference)
        page, _ = world.manager.snapshots.list(
            stranger, sandbox_id=None, name=None, limit=10, token=None
        )
        assert page == ()


async def test_an_administrators_names_resolve_in_the_own_team_first() -> None:
    async with paddock() as world:
        admin, other = Caller("default", role=Role.OPERATOR), Caller("others")
        mine = await world.manager.snapshots.create(
            admin, id_of(await a_sandbox(world)), name="Same"
        )
        made = await world.manager.claims.create(
            other, NewSandbox(template="base", timeout_seconds=None)
        )
        await asyncio.sleep(1)
        theirs = await world.manager.snapshots.create(other, id_of(made), name="same")
        for reference in ("same", "Same", "same:default", "default/same"):
            clone = await world.manager.claims.create(admin, NewSandbox(template=reference))
            assert clone.spec.restore_from == mine.status.checkpoint_id
        clone = await world.manager.claims.create(admin, NewSandbox(template="others/same"))
        assert clone.spec.restore_from == theirs.status.checkpoint_id
        await world.manager.templates.delete(admin, "same")
        await world.until(lambda: world.provider.get(Checkpoint, mine.key) is None)
        assert world.provider.get(Checkpoint, theirs.key) is not None


async def test_an_unknown_tag_is_not_found() -> None:
    async with paddock() as world:
        tool = SandboxTemplate(
            metadata=ObjectMeta(name="tool", namespace="default"), spec=SandboxTemplateSpec()
        )
        await world.provider.write.create(tool)
        await world.manager.snapshots.create(CALLER, id_of(await a_sandbox(world)), name="saved:v1")
        for reference in ("tool:v2", "base:v2", "saved:v2", "saved", "others/tool"):
            with pytest.raises(NotFoundError):
                await world.manager.claims.create(CALLER, NewSandbox(template=reference))
            with pytest.raises(NotFoundError):
                await world.manager.templates.delete(CALLER, reference)
        for reference in ("tool", "TOOL:default", "default/tool", "saved:v1"):
            await world.manager.claims.create(CALLER, NewSandbox(template=reference))
        admin = Caller("default", role=Role.OPERATOR)
        await world.manager.templates.delete(admin, "default/tool:default")
        await world.until(lambda: world.provider.get(SandboxTemplate, tool.key) is None)


async def test_a_snapshot_survives_its_sandbox_until_it_is_deleted() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        stored = await world.manager.snapshots.create(CALLER, id_of(sandbox), name="kept")
        await world.manager.lifecycle.kill(CALLER, id_of(sandbox))
        await asyncio.sleep(5_000)
        clone = await world.manager.claims.create(
            CALLER, NewSandbox(template="kept", timeout_seconds=None)
        )
        await world.manager.templates.delete(CALLER, "kept")
        await world.until(lambda: world.provider.get(Checkpoint, stored.key) is None)
        assert stored.metadata.uid not in {item.id for item in await world.runtime.checkpoints()}
        assert (await world.manager.queries.get(CALLER, id_of(clone))).status.phase is Phase.RUNNING


async def test_a_checkpoint_may_be_applied_before_its_sandbox() -> None:
    async with paddock() as world:
        early = Checkpoint(
            metadata=ObjectMeta(name="early", namespace="default"),
            spec=CheckpointSpec(sandbox_name="scratch"),
        )
        await world.store.create(early)
        await asyncio.sleep(20)
        await world.store.create(
            Sandbox(
                metadata=ObjectMeta(name="scratch", namespace="default"),
                spec=SandboxSpec(template_ref=TemplateRef(name="base")),
            )
        )
        await world.until(
            lambda: (
                world.provider.get(Checkpoint, early.key).status.phase is CheckpointPhase.SUCCEEDED
            )
        )


async def test_snapshots_of_a_killed_warm_sandbox_are_found_by_its_id() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        first, second = await a_sandbox(world), await a_sandbox(world)
        stored = await world.manager.snapshots.create(CALLER, id_of(first), name=None)
        await world.manager.snapshots.create(CALLER, id_of(second), name=None)
        await world.manager.lifecycle.kill(CALLER, id_of(first))
        await asyncio.sleep(5)
        answer = await world.http.get(f"/snapshots?sandboxID={id_of(first)}")
        ids = [item["snapshotID"] for item in answer.json()]
        assert ids == [stored.status.checkpoint_id]


async def test_a_fork_is_like_its_source() -> None:
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        source = await world.manager.claims.create(
            CALLER,
            NewSandbox(
                template="base",
                auto_pause=True,
                auto_resume=True,
                secure=False,
                paused_retention_seconds=777,
                labels={"team": "blue"},
                metadata={"a": "1"},
                resources=Resources(cpu="500m"),
            ),
        )
        (forked,) = await world.manager.snapshots.fork(
            CALLER, id_of(source), count=1, timeout_seconds=60
        )
        clone = forked.sandbox
        assert clone is not None, forked.error
        assert clone.spec.claim is not None
        assert clone.spec.claim.access_token_hash == ""
        assert clone.spec.claim.auto_pause
        assert clone.spec.wake_on_traffic is not None
        assert clone.spec.wake_on_traffic.enabled
        assert clone.spec.paused_retention_seconds == 777
        assert clone.spec.resources == source.spec.resources
        assert clone.metadata.labels["team"] == "blue"


async def test_each_failed_fork_reports_its_own_error() -> None:
    async with paddock() as world:
        sandbox_id = id_of(await a_sandbox(world))
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 2)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))
        path = f"/sandboxes/{sandbox_id}/fork"
        answer = await world.http.post(path, json={"count": 2, "timeout": 60})
        assert answer.status_code == 201
        (failed,) = [item["error"] for item in answer.json() if "error" in item]
        assert failed["code"] == 429
        # Invalid requests are refused before anything is stored.
        answer = await world.http.post(path, json={"timeout": 10**8})
        assert (answer.status_code, answer.json()["code"]) == (400, 400)
        assert len(world.provider.checkpoints("default")) == 1


async def test_the_temporary_snapshot_of_a_fork_is_deleted_and_its_clones_stay() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        forks = await world.manager.snapshots.fork(
            CALLER, id_of(sandbox), count=2, timeout_seconds=10_000
        )
        assert len(world.provider.all(Checkpoint)) == 1
        page, _ = world.manager.snapshots.list(
            CALLER, sandbox_id=None, name=None, limit=10, token=None
        )
        assert page == ()
        await asyncio.sleep(FORK_TTL_SECONDS + 5)
        assert not world.provider.all(Checkpoint)
        assert await world.runtime.checkpoints() == ()
        for fork in forks:
            found = await world.manager.queries.get(CALLER, id_of(fork.sandbox))
            assert found.status.phase is Phase.RUNNING


async def test_a_name_resolves_to_its_newest_snapshot() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        await world.manager.snapshots.create(CALLER, id_of(sandbox), name="state")
        await asyncio.sleep(5)
        second = await world.manager.snapshots.create(CALLER, id_of(sandbox), name="state")
        clone = await world.manager.claims.create(CALLER, NewSandbox(template="state"))
        assert clone.spec.restore_from == second.status.checkpoint_id
