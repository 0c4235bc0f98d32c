"""Quotas of stored bytes, through the APIs and a restart, on the simulated runtime."""

import asyncio

import pytest

from paddock.claims.caller import Caller
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import DiskFullError, QuotaExceededError
from paddock.resources.kinds.checkpoint import (
    Checkpoint,
    CheckpointPhase,
    CheckpointSpec,
    Content,
)
from paddock.resources.kinds.sandbox import CONDITION_READY, Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import Key, ObjectMeta, condition
from paddock.runtime.simulated import STORED_MEMORY_BYTES, Operation, SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

MIB = 1 << 20


def id_of(sandbox: Sandbox | None) -> str:
    assert sandbox is not None
    assert sandbox.spec.claim is not None
    return sandbox.spec.claim.sandbox_id


async def a_sandbox(world: World, caller: Caller = CALLER, **wanted) -> Sandbox:
    return await world.manager.claims.create(
        caller, NewSandbox(template="base", timeout_seconds=None, **wanted)
    )


async def limit(world: World, size: int, team: str = "default") -> None:
    quota = Quota((QuotaLimit(Dimension.STORED, QuotaScope.ALL, size),))
    await world.plane.keyring.set_team_quota(team, quota)


async def usage(world: World) -> dict:
    [team] = [item for item in (await world.http.get("/teams")).json() if item["name"] == "default"]
    [stored] = [item for item in team["usage"] if item["dimension"] == "stored.bytes"]
    return stored


async def kept(world: World) -> int:
    """Return the bytes that the runtime has stored for checkpoints."""
    return sum(item.size_bytes for item in await world.runtime.checkpoints())


async def test_a_full_quota_refuses_snapshots_with_429_until_one_is_deleted() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        path = f"/sandboxes/{id_of(sandbox)}/snapshots"
        body = {"quota": {"limits": [{"dimension": "stored.bytes", "scope": "all"}]}}
        body["quota"]["limits"][0]["limit"] = 65 * MIB
        assert (await world.http.patch("/teams/default", json=body)).status_code == 200
        made = [(await world.http.post(path, json={})).json()["snapshotID"] for _ in range(2)]
        assert await usage(world) == {
            "dimension": "stored.bytes", "scope": "all", "used": 60 * MIB, "limit": 65 * MIB,
        }  # fmt: skip
        refused = await world.http.post(path, json={})
        assert refused.status_code == 429
        assert refused.headers["Should-Retry"] == "false"
        assert "team default has 60 MiB of 65 MiB stored.bytes; this needs" in refused.text
        assert await kept(world) == 60 * MIB
        # The refusal leaves nothing, neither in the store nor on the disk.
        await world.until(lambda: len(world.provider.checkpoints("default")) == 2)
        assert (await world.http.delete(f"/templates/{made[0]}")).status_code == 204
        assert (await usage(world))["used"] == 30 * MIB
        assert (await world.http.post(path, json={})).status_code == 201


async def test_a_limit_of_stored_bytes_has_the_scope_all() -> None:
    async with paddock() as world:
        wrong = {"dimension": "stored.bytes", "scope": "running", "limit": 1}
        refused = await world.http.patch("/teams/default", json={"quota": {"limits": [wrong]}})
        assert refused.status_code == 400
        assert "quota.limits[0].scope" in refused.text
        misspelt = {"dimension": "stored.byte", "scope": "all", "limit": 1}
        refused = await world.http.patch("/teams/default", json={"quota": {"limits": [misspelt]}})
        assert refused.status_code == 400


async def test_a_snapshot_is_refused_by_its_estimate_before_work_begins() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        world.runtime.files(sandbox.metadata.uid)["large"] = "x" * (3 * MIB)
        await limit(world, 6 * MIB)
        with pytest.raises(QuotaExceededError, match="this needs 7 MiB"):
            await world.manager.snapshots.create(CALLER, id_of(sandbox), name=None)
        assert world.runtime.calls[Operation.SNAPSHOT] == 0
        files_only = await world.manager.snapshots.create(
            CALLER, id_of(sandbox), name=None, memory=False
        )
        assert files_only.status.size_bytes == 3 * MIB


async def test_a_snapshot_larger_than_its_estimate_and_the_quota_fails_and_leaves_nothing() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        await limit(world, 20 * MIB)  # above the estimate of 4 MiB, below the size of 30 MiB
        with pytest.raises(QuotaExceededError, match="this needs 30 MiB"):
            await world.manager.snapshots.create(CALLER, id_of(sandbox), name=None)
        assert world.runtime.calls[Operation.SNAPSHOT] == 1
        assert await kept(world) == 0
        assert (await usage(world))["used"] == 0
        await world.until(lambda: not world.provider.checkpoints("default"))
        found = await world.manager.queries.get(CALLER, id_of(sandbox))
        assert found.status.phase is Phase.RUNNING


async def test_concurrent_snapshots_stay_within_the_quota() -> None:
    async with paddock(pool_size=4) as world:
        sandboxes = [await a_sandbox(world) for _ in range(8)]
        await limit(world, 100 * MIB)
        most = 0

        async def measure() -> None:
            nonlocal most
            while True:
                most = max(most, await kept(world))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(measure())
        results = await asyncio.gather(
            *(world.manager.snapshots.create(CALLER, id_of(item), name=None) for item in sandboxes),
            return_exceptions=True,
        )
        watching.cancel()
        made = [item for item in results if isinstance(item, Checkpoint)]
        refused = [item for item in results if isinstance(item, QuotaExceededError)]
        assert (len(made), len(refused)) == (3, 5)
        assert await kept(world) == (await usage(world))["used"] == 90 * MIB
        # Each may have stored what its estimate did not say, and no more.
        assert most <= 100 * MIB + 8 * (STORED_MEMORY_BYTES - 4 * MIB)


async def test_a_checkpoint_made_with_kubectl_is_held_to_the_same_quota() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        await limit(world, 35 * MIB)
        for name in ("one", "two"):
            await world.store.create(
                Checkpoint(
                    metadata=ObjectMeta(name=name, namespace="default"),
                    spec=CheckpointSpec(sandbox_name=sandbox.metadata.name),
                )
            )
            key = Key("default", name)

            def is_finished(key: Key = key) -> bool:
                found = world.provider.get(Checkpoint, key)
                return found is not None and found.status.completion_time is not None

            await world.until(is_finished)
        second = await world.store.get(Checkpoint, Key("default", "two"))
        assert second.status.phase is CheckpointPhase.FAILED
        ready = condition(second.status.conditions, CONDITION_READY)
        assert ready is not None
        assert ready.reason == "QuotaExceeded"
        assert await kept(world) == 30 * MIB


async def test_a_pause_is_never_refused_and_counts() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world, pause_strategy=PauseStrategy.HIBERNATE)
        await limit(world, 10 * MIB)
        await world.manager.lifecycle.pause(CALLER, id_of(sandbox))
        assert (await usage(world))["used"] == STORED_MEMORY_BYTES
        other = await a_sandbox(world)  # creates do not count in stored bytes
        with pytest.raises(QuotaExceededError, match="team default has 30 MiB of 10 MiB"):
            await world.manager.snapshots.create(CALLER, id_of(other), name=None)
        await world.manager.lifecycle.connect(CALLER, id_of(sandbox), timeout_seconds=600)
        assert (await usage(world))["used"] == 0


async def test_forks_do_not_count() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        await limit(world, 0)
        [made] = await world.manager.snapshots.fork(
            CALLER, id_of(sandbox), count=1, timeout_seconds=600
        )
        assert made.error is None
        assert (await usage(world))["used"] == 0


async def test_a_key_with_a_quota_of_its_own_is_held_to_it() -> None:
    async with paddock() as world:
        stored = {"dimension": "stored.bytes", "scope": "all", "limit": 35 * MIB}
        made = await world.http.post(
            "/api-keys", json={"name": "robot", "quota": {"limits": [stored]}}
        )
        caller = Caller("default", made.json()["id"])
        sandbox = await a_sandbox(world, caller)
        await world.manager.snapshots.create(caller, id_of(sandbox), name=None)
        with pytest.raises(QuotaExceededError, match="key "):
            await world.manager.snapshots.create(caller, id_of(sandbox), name=None)
        await world.manager.snapshots.create(CALLER, id_of(sandbox), name=None)


async def test_a_restarted_control_plane_knows_what_is_stored() -> None:
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock)
    async with paddock(store=store, runtime=runtime, clock=clock) as world:
        sandbox = await a_sandbox(world)
        await limit(world, 65 * MIB)
        await world.manager.snapshots.create(CALLER, id_of(sandbox), name=None)
        runtime.set_latency(Operation.SNAPSHOT, 5)
        unfinished = asyncio.create_task(
            world.manager.snapshots.create(CALLER, id_of(sandbox), name="second")
        )
        await world.until(lambda: runtime.calls[Operation.SNAPSHOT] == 2)
        unfinished.cancel()
    runtime.set_latency(Operation.SNAPSHOT, 0.1)
    async with paddock(store=store, runtime=runtime, clock=clock) as world:
        await world.until(lambda: world.plane.assembly.stored.used("team:default") == 60 * MIB)
        assert (await usage(world))["used"] == 60 * MIB
        with pytest.raises(QuotaExceededError):
            await world.manager.snapshots.create(CALLER, id_of(sandbox), name=None)
        assert await kept(world) == 60 * MIB


async def test_a_node_without_space_refuses_with_507_and_leaves_nothing() -> None:
    async with paddock() as world:
        sandbox = await a_sandbox(world)
        world.runtime.fail_next(Operation.SNAPSHOT, DiskFullError("disk /state is full"))
        refused = await world.http.post(f"/sandboxes/{id_of(sandbox)}/snapshots", json={})
        assert refused.status_code == 507
        assert "disk /state is full" in refused.text
        assert world.runtime.calls[Operation.SNAPSHOT] == 1
        await world.until(lambda: not world.provider.checkpoints("default"))


async def test_a_create_without_space_is_refused_at_once_with_507_and_cleaned_up() -> None:
    async with paddock(pool_size=0) as world:
        message = "cannot create the disk of sandbox x: the disk of /state has 1 GiB free"
        world.runtime.fail_next(Operation.CREATE, DiskFullError(message))
        began = asyncio.get_running_loop().time()
        refused = await world.http.post("/sandboxes", json={"templateID": "base"})
        assert refused.status_code == 507
        assert message in refused.text
        assert asyncio.get_running_loop().time() - began < 1
        await world.until(lambda: not world.provider.sandboxes("default"))


async def test_a_pool_waits_for_space() -> None:
    clock = LoopClock()
    runtime = SimulatedRuntime(clock=clock)
    for _ in range(4):
        runtime.fail_next(Operation.CREATE, DiskFullError("no space"))
    async with paddock(pool_size=2, runtime=runtime, clock=clock) as world:
        await world.stocked(2)


async def test_checkpoints_of_the_same_files_count_once_and_need_no_room_for_them() -> None:
    async def stored(world: World, sandbox: Sandbox, name: str) -> Checkpoint:
        wanted = Checkpoint(
            metadata=ObjectMeta(name=name, namespace="default"),
            spec=CheckpointSpec(
                sandbox_name=sandbox.metadata.name,
                sandbox_uid=sandbox.metadata.uid,
                persistent_contents=(Content.FILESYSTEM,),
                owner="default",
            ),
        )
        created = await world.store.create(wanted)
        return await world.provider.waits.checkpoint(created).wait(60, written=created)

    async with paddock() as world:
        sandbox = await a_sandbox(world)
        world.runtime.files(sandbox.metadata.uid)["large"] = "x" * 40_000
        await limit(world, 60_000)
        await stored(world, sandbox, "one")
        world.runtime.files(sandbox.metadata.uid)["small"] = "x" * 100
        second = await stored(world, sandbox, "two")
        assert (await usage(world))["used"] == 40_100
        world.runtime.files(sandbox.metadata.uid)["other"] = "x" * 30_000
        with pytest.raises(QuotaExceededError):
            await stored(world, sandbox, "three")
        # A sandbox that starts from one shares its files, too.
        clone = await world.manager.claims.create(
            CALLER,
            NewSandbox(template=second.status.checkpoint_id, timeout_seconds=None),
        )
        world.runtime.files(clone.metadata.uid)["new"] = "x" * 50
        await stored(world, clone, "four")
        assert (await usage(world))["used"] == 40_150
