"""Behaviour of pools and batches that operators of similar platforms guarantee.

Changing pool bounds, eviction, reuse over several cycles, recycling per pool, every reason for
selecting a pool, pauses of every kind of batch, restarts in the middle.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddock.kit.clock import LoopClock
from paddock.resources.kinds.batch import BatchPhase
from paddock.resources.kinds.pool import Capacity, RecycleStrategy, RecycleType
from paddock.resources.kinds.sandbox import LABEL_EVICT, Sandbox
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import Key, with_meta
from paddock.runtime.port import InstanceState
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.controllers.batch.make import Batches, batch, pool, task
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

P = Key("default", "p")


async def change_pool(world: World, name: str, **capacity: int) -> None:
    found = world.pool(name)
    old = found.spec.capacity or Capacity()
    spec = structs.replace(found.spec, capacity=structs.replace(old, **capacity))
    await world.provider.write.update(structs.replace(found, spec=spec))


def on_nodes(spec: dict[str, Any], **more: Any) -> SandboxTemplateSpec:
    return SandboxTemplateSpec(pod_template={"spec": spec}, **more)


# ---- pools ---------------------------------------------------------------------------------------


async def test_a_pool_stays_between_its_bounds_and_follows_them_when_they_change() -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        wanted = pool("p", buffer=0, most=10)
        capacity = Capacity(buffer_min=0, buffer_max=10, pool_min=2, pool_max=10)
        await batches.create(
            structs.replace(wanted, spec=structs.replace(wanted.spec, capacity=capacity))
        )
        await world.until(lambda: batches.pool_status("p").total == 2)
        await change_pool(world, "p", pool_min=5)
        await world.until(lambda: batches.pool_status("p").total == 5)
        await change_pool(world, "p", pool_min=0, pool_max=3, buffer_max=3)
        await world.until(lambda: batches.pool_status("p").total <= 3)
        await asyncio.sleep(30)
        assert batches.pool_status("p").total <= 3


async def test_shrinking_a_pool_never_deletes_allocated_sandboxes() -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=2, most=10))
        await batches.create(batch("b", 4, pool_ref="p"))
        await batches.ready("b")
        held = batches.held("b")
        await change_pool(world, "p", pool_max=2, buffer_min=0, buffer_max=0)
        await world.until(lambda: batches.pool_status("p").available == 0)
        await asyncio.sleep(30)
        assert batches.held("b") == held
        assert batches.pool_status("p").total == 4


async def test_an_evicted_sandbox_is_not_allocated() -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=3, most=8))
        await world.stocked(3, "p")
        marked = [
            item.metadata.uid for item in world.plane.pool_members.members(P).available.values()
        ]
        for key in tuple(world.plane.pool_members.members(P).available):
            await batches.write.mutate(
                Sandbox,
                key,
                lambda old: with_meta(old, labels={**old.metadata.labels, LABEL_EVICT: "yes"}),
            )
        await batches.create(batch("b", 3, pool_ref="p"))
        await batches.ready("b")
        assert set(batches.held("b").values()).isdisjoint(marked)


# ---- recycling -----------------------------------------------------------------------------------


async def test_the_same_sandboxes_serve_cycle_after_cycle() -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        strategy = RecycleStrategy(type=RecycleType.NOOP)
        await batches.create(pool("p", buffer=3, most=3, recycle_strategy=strategy))
        seen = []
        for number in range(3):
            await batches.create(batch(f"b{number}", 3, pool_ref="p"))
            await batches.ready(f"b{number}")
            seen.append(frozenset(batches.held(f"b{number}").values()))
            await batches.delete(f"b{number}")
        assert len(set(seen)) == 1
        await world.until(lambda: batches.pool_status("p").available == 3)
        assert batches.pool_status("p").allocated == 0


async def test_pools_use_their_own_recycling_strategy() -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        for kind in RecycleType:
            strategy = RecycleStrategy(type=kind)
            await batches.create(pool(kind.lower(), buffer=1, most=1, recycle_strategy=strategy))
            await batches.create(batch(f"in-{kind.lower()}", 1, pool_ref=kind.lower()))
        used = {}
        for kind in RecycleType:
            await batches.ready(f"in-{kind.lower()}")
            (used[kind],) = batches.held(f"in-{kind.lower()}").values()
            world.runtime.files(used[kind])["/dirt"] = "x"
        for kind in RecycleType:
            await batches.delete(f"in-{kind.lower()}")
            await batches.create(batch(f"again-{kind.lower()}", 1, pool_ref=kind.lower()))
        again = {}
        for kind in RecycleType:
            await batches.ready(f"again-{kind.lower()}")
            (again[kind],) = batches.held(f"again-{kind.lower()}").values()
        assert again[RecycleType.NOOP] == used[RecycleType.NOOP]
        assert world.runtime.files(again[RecycleType.NOOP])["/dirt"] == "x"
        assert again[RecycleType.RESTART] == used[RecycleType.RESTART]
        assert "/dirt" not in world.runtime.files(again[RecycleType.RESTART])
        assert again[RecycleType.DELETE] != used[RecycleType.DELETE]


# ---- pool selection -----------------------------------------------------------------------------

_IN_A = {
    "key": "zone",
    "operator": "In",
    "values": ["a", "c"],
}


def _affinity(*expressions: dict[str, Any]) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return {"affinity": {"nodeAffinity": required}}


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [
        pytest.param(SandboxTemplateSpec(image="node"), "node", id="image"),
        pytest.param(
            SandboxTemplateSpec(image="python", resources=Resources(cpu="3")), "large", id="cpu"
        ),
        pytest.param(
            SandboxTemplateSpec(image="python", resources=Resources(memory="8Gi")),
            "large",
            id="memory",
        ),
        pytest.param(
            on_nodes({"nodeSelector": {"zone": "b"}}, image="python"), "zoned", id="node selector"
        ),
        pytest.param(
            on_nodes(_affinity({**_IN_A, "values": ["b"]}), image="python"),
            "zoned",
            id="node affinity",
        ),
        pytest.param(
            on_nodes(_affinity({"key": "zone", "operator": "Exists"}), image="python"),
            "zoned",
            id="any zone",
        ),
        pytest.param(on_nodes(_affinity(_IN_A), image="python"), None, id="no such zone"),
    ],
)
async def test_a_batch_is_assigned_to_a_pool_that_fits(
    wish: SandboxTemplateSpec, chosen: str | None
) -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        small, large = Resources(cpu="1", memory="1Gi"), Resources(cpu="4", memory="8Gi")
        zone = {"nodeSelector": {"zone": "b"}}
        await batches.create(
            pool("small", template=SandboxTemplateSpec(image="python", resources=small)),
            pool("large", template=SandboxTemplateSpec(image="python", resources=large)),
            pool("node", template=SandboxTemplateSpec(image="node", resources=small)),
            pool("zoned", template=on_nodes(zone, image="python", resources=small)),
        )
        await batches.create(batch("b", 1, pool_ref="*", template=wish))
        if chosen is None:
            await asyncio.sleep(20)
            assert batches.get("b").status.pool in ("", "*")
            assert batches.held("b") == {}
        else:
            await batches.ready("b")
            assert batches.get("b").status.pool == chosen


async def test_a_batch_without_requirements_is_assigned_to_the_only_pool() -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        await world.provider.write.delete(world.pool("base"))
        await batches.create(pool("only"))
        await batches.create(batch("b", 2, pool_ref="*"))
        await batches.ready("b")
        assert batches.get("b").status.pool == "only"


async def test_labels_and_scores_are_chosen_by_profile(tmp_path: Path) -> None:
    profiles = [
        {"name": "mine", "predicates": ["labelselector"], "labelKeys": ["team"], "scores": []}
    ]
    (tmp_path / "assign-profiles.json").write_text(json.dumps(profiles))
    async with paddock(pool_size=0, state_dir=str(tmp_path)) as world:
        batches = Batches(world)
        await batches.create(
            pool("blue", pool_labels={"team": "blue"}), pool("red", pool_labels={"team": "red"})
        )
        for team in ("red", "blue"):
            await batches.create(
                batch(team, 1, pool_ref="*", labels={"team": team}, assign_profile="mine")
            )
            await batches.ready(team)
            assert batches.get(team).status.pool == team


# ---- pauses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["direct", "pooled", "with a task"])
async def test_files_and_tasks_survive_a_pause(kind: str) -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=0, most=10))
        source = {"template": SandboxTemplateSpec()} if kind == "direct" else {"pool_ref": "p"}
        work = {"task_template": task("sleep", "60")} if kind == "with a task" else {}
        await batches.create(batch("b", 2, **source, **work))
        await batches.ready("b")
        held = batches.held("b")
        for uid in held.values():
            world.runtime.files(uid)["/marker"] = uid
        await batches.change("b", pause=True)
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.PAUSED)
        for uid in held.values():
            instance = await world.runtime.inspect(uid)
            assert instance is not None
            assert instance.state is InstanceState.FROZEN
        await asyncio.sleep(120)
        await batches.change("b", pause=False)
        await batches.ready("b")
        assert batches.held("b") == held
        assert all(world.runtime.files(uid)["/marker"] == uid for uid in held.values())
        if work:
            await world.until(
                lambda: batches.get("b").status.phase is BatchPhase.COMPLETED, seconds=300
            )
            runs = world.plane.batches.task_watcher._runner.runs  # type: ignore[attr-defined]
            assert sorted(runs.values()) == [1, 1], "nothing ran twice"


async def test_a_shard_that_cannot_resume_is_replaced_and_others_continue() -> None:
    async with paddock(pool_size=0) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=0, most=10))
        await batches.create(batch("b", 3, pool_ref="p"))
        await batches.ready("b")
        held = batches.held("b")
        await batches.change("b", pause=True)
        await world.until(lambda: batches.get("b").status.phase is BatchPhase.PAUSED)
        world.runtime.crash(held[1])
        await batches.change("b", pause=False)
        await batches.ready("b")
        now = batches.held("b")
        assert (now[0], now[2]) == (held[0], held[2])
        assert now[1] != held[1]


# ---- restarts ------------------------------------------------------------------------------------


async def test_a_restart_during_an_update_neither_loses_nor_duplicates_anything() -> None:
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock)
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        batches = Batches(world)
        await batches.create(pool("p", buffer=4, most=20))
        await batches.create(batch("kept", 3, pool_ref="p"), batch("released", 2, pool_ref="p"))
        await batches.ready("kept")
        await batches.ready("released")
        held = batches.held("kept")
        await batches.delete("released")
        found = world.pool("p")
        new = structs.replace(found.spec, template=SandboxTemplateSpec(env={"VERSION": "2"}))
        await batches.write.update(structs.replace(found, spec=new))
        await batches.create(batch("late", 3, pool_ref="p"))
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        batches = Batches(world)
        await batches.ready("late")
        assert batches.held("kept") == held
        assert set(batches.held("late").values()).isdisjoint(held.values())
        await world.until(
            lambda: (s := batches.pool_status("p")).updated_available == s.available == 4,
            seconds=120,
        )
        status = batches.pool_status("p")
        assert (status.allocated, status.total) == (6, 10)
        assert batches.allocated("p") == 6
