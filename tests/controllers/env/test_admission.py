"""Admission of pools: quotas, capacity, third-party plugins, and failing ones."""

import asyncio
import subprocess
import sys
import threading
import time
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.controllers.admission.gate import AdmissionGate, AdmissionOutcome, load
from paddock.controllers.admission.limits import Amounts, CapacityPlugin, QuotaPlugin
from paddock.controllers.admission.plugin import (
    AdmissionContext,
    AdmissionPlugin,
    PoolAdmission,
    PoolRequest,
    merged,
)
from paddock.controllers.env.render import capacity_of
from paddock.resources.kinds.env import MemberState, ScalingGroup
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, condition, is_true
from tests.controllers.env.make import change_members, environment, found, idle, member, pool, seen
from tests.scenario.paddock import paddock


def a_pool(name: str = "p", size: int = 0, namespace: str = "default") -> SandboxPool:
    template = SandboxTemplateSpec(resources=Resources(cpu="1", memory="1Gi"))
    return SandboxPool(
        metadata=ObjectMeta(name=name, namespace=namespace),
        spec=SandboxPoolSpec(template=template, capacity=capacity_of(size)),
    )


def ask(replicas: int) -> PoolRequest:
    return PoolRequest(pool=a_pool(size=replicas), current=a_pool(), replicas=replicas)


class AtMost(AdmissionPlugin):
    """Admits or refuses without a limit."""

    def __init__(self, limit: int, name: str = "at most") -> None:
        self.name = name
        self._limit = limit
        self.asked = 0

    async def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        self.asked += 1
        if request.replicas <= self._limit:
            return PoolAdmission()
        return PoolAdmission(admitted=0, retry_after_seconds=7, reason="Full", message="it is full")

    pre_create_pool = pre_update_pool


@given(st.integers(1, 5000), st.integers(0, 6000))
def test_the_largest_admissible_size_is_found_in_few_calls(wanted: int, limit: int) -> None:
    plugin = AtMost(limit)
    verdict = asyncio.run(AdmissionGate([plugin]).size(ask(wanted)))
    assert verdict.admitted == min(wanted, limit)
    assert plugin.asked <= 2 + wanted.bit_length()
    if limit < wanted:
        assert verdict.reason == "Full"
        assert verdict.retry_after_seconds == 7


class Exact(AdmissionPlugin):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.asked = 0

    async def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        self.asked += 1
        return PoolAdmission(admitted=self._limit)


async def test_a_limit_that_a_plugin_returns_is_verified_with_one_call() -> None:
    plugin = Exact(700)
    verdict = await AdmissionGate([plugin]).size(ask(100_000))
    assert verdict.admitted == 700
    assert plugin.asked <= 3


def test_several_answers_merge_to_the_smallest_size_and_the_longest_wait() -> None:
    answer = merged(
        [
            PoolAdmission(),
            PoolAdmission(admitted=9, retry_after_seconds=60, reason="A"),
            PoolAdmission(admitted=4, retry_after_seconds=5, reason="B", message="b"),
        ]
    )
    assert answer == PoolAdmission(admitted=4, retry_after_seconds=60, reason="B", message="b")


async def test_several_plugins_together_admit_the_least() -> None:
    verdict = await AdmissionGate([AtMost(20, "a"), AtMost(12, "b"), AtMost(30, "c")]).size(ask(50))
    assert (verdict.outcome, verdict.admitted) == (AdmissionOutcome.JUST_RIGHT, 12)


class Raises(AdmissionPlugin):
    name = "raiser"

    async def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        raise RuntimeError("oh no")


class Hangs(AdmissionPlugin):
    name = "hanger"

    async def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        await asyncio.Event().wait()
        return PoolAdmission()


class ReturnsGarbage(AdmissionPlugin):
    name = "babbler"

    async def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        return "yes"  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("plugin", "words"),
    [(Raises(), "oh no"), (Hangs(), "did not answer"), (ReturnsGarbage(), "'yes'")],
)
async def test_a_plugin_that_fails_is_named(plugin: AdmissionPlugin, words: str) -> None:
    verdict = await AdmissionGate([plugin], timeout_seconds=0.01).size(ask(3))
    assert verdict.outcome is AdmissionOutcome.FAILED
    assert words in verdict.message
    assert plugin.name in verdict.message


async def test_a_plugin_that_blocks_its_thread_blocks_no_other_request() -> None:
    release = threading.Event()

    class Blocks(AdmissionPlugin):
        name = "blocker"

        def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
            release.wait(20)
            return PoolAdmission()

    gate = AdmissionGate([Blocks()], timeout_seconds=0.05)
    started = time.monotonic()
    assert (await gate.size(ask(3))).outcome is AdmissionOutcome.FAILED
    gate._skipped_until.clear()
    assert "still blocked" in (await gate.size(ask(3))).message
    assert time.monotonic() - started < 15, "it was waited for"
    release.set()
    # From here on it responds, as soon as a busy machine schedules its thread.
    gate._timeout = 60.0
    async with asyncio.timeout(60):
        while (await gate.size(ask(3))).outcome is not AdmissionOutcome.ENOUGH:
            await asyncio.sleep(0.01)


@pytest.mark.timeout(60)
def test_a_blocked_plugin_does_not_keep_the_process_from_exiting() -> None:
    script = """
import asyncio, sys, threading
from paddock.controllers.admission.gate import AdmissionGate
from paddock.controllers.admission.plugin import AdmissionPlugin
from tests.controllers.env.test_admission import ask

class Blocks(AdmissionPlugin):
    def pre_update_pool(self, request):
        threading.Event().wait()

verdict = asyncio.run(AdmissionGate([Blocks()], timeout_seconds=0.05).size(ask(3)))
print(verdict.outcome)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True
    )
    assert ended.stdout == "Failed\n"


def a_plugin(_context: AdmissionContext) -> AdmissionPlugin:
    return AtMost(3, "found by its entry point")


async def test_plugins_are_loaded_by_entry_point_and_a_broken_one_is_reported() -> None:
    good = EntryPoint("good", "tests.controllers.env.test_admission:a_plugin", "paddock.admission")
    bad = EntryPoint("bad", "tests.env.nowhere:plugin", "paddock.admission")
    context: AdmissionContext = None  # type: ignore[assignment]
    assert (await load(context, [], entry_points=[good]).size(ask(9))).admitted == 3
    verdict = await load(context, [], entry_points=[good, bad]).size(ask(9))
    assert verdict.outcome is AdmissionOutcome.FAILED
    assert "bad" in verdict.message


class Kept:
    def __init__(self, *pools: SandboxPool) -> None:
        self._kept = pools

    def pools(self, namespace):
        return [item for item in self._kept if namespace in (None, item.metadata.namespace)]

    def template(self, pool):
        return pool.spec.template


async def test_a_quota_counts_all_pools_of_its_namespace() -> None:
    kept = Kept(a_pool("other", 6), a_pool("far", 50, "elsewhere"), a_pool("p", 1))
    gate = AdmissionGate([QuotaPlugin(kept, lambda _: Amounts(sandboxes=10))])
    verdict = await gate.size(ask(9))
    assert verdict.admitted == 4
    assert verdict.reason == "QuotaExceeded"
    assert "10 sandboxes" in verdict.message


async def test_node_capacity_counts_cpu_and_memory_of_all_pools() -> None:
    kept = Kept(a_pool("other", 6), a_pool("far", 2, "elsewhere"))
    held = Amounts(cpu_millis=100_000, memory_bytes=11 << 30)
    verdict = await AdmissionGate([CapacityPlugin(kept, lambda: held)]).size(ask(9))
    assert verdict.admitted == 3
    assert verdict.reason == "NodeCapacityExceeded"


# ---- in a control plane ----------------------------------------------------------------------


@pytest.mark.looptime
async def test_a_request_is_partly_admitted_and_completed_when_the_quota_grows() -> None:
    async with paddock(pool_size=0) as world:
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 3)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))
        await world.provider.write.create(environment({"one": member(5)}))
        await idle(world, "agents-one", 3)
        await asyncio.sleep(15)
        shown = seen(world, "one")
        assert shown is not None
        assert (shown.state, shown.desired) == (MemberState.SATURATED, 3)
        assert shown.saturated_until is not None
        admitted = condition(found(world).status.conditions, "Admitted")
        assert admitted is not None
        assert "3 of 5 fit" in admitted.message
        more = QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 30)
        await world.plane.keyring.set_team_quota("default", Quota((more,)))
        await idle(world, "agents-one", 5, seconds=120)
        await asyncio.sleep(15)
        assert is_true(found(world).status.conditions, "Admitted")


@pytest.mark.looptime
@pytest.mark.parametrize("plugin", [Raises(), Hangs()])
async def test_a_failing_plugin_is_reported_in_a_condition_and_stops_nothing_else(plugin) -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member(2)}))
        await idle(world, "agents-one", 2)
        world.plane.environments.gate._plugins = (plugin,)
        await change_members(world, {"one": member(4), "two": member(1)})
        await idle(world, "agents-two", 1)
        await asyncio.sleep(30)
        admitted = condition(found(world).status.conditions, "Admitted")
        assert admitted is not None
        assert admitted.reason == "PluginFailed"
        assert plugin.name in admitted.message
        assert len(world.plane.pool_members.members(pool(world, "agents-one").key).available) == 2
        await change_members(world, {"one": member(1), "two": member(1)})
        await idle(world, "agents-one", 1)


class Guards(AdmissionPlugin):
    name = "guard"

    async def pre_delete_pool(self, request: PoolRequest) -> PoolAdmission:
        return PoolAdmission(admitted=0, reason="Precious", message="it is precious")


@pytest.mark.looptime
async def test_a_plugin_can_refuse_the_deletion_of_a_pool() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"one": member(1), "two": member(1)}))
        await idle(world, "agents-two", 1)
        world.plane.environments.gate._plugins = (Guards(),)
        await change_members(world, {"one": member(1)})
        await asyncio.sleep(30)
        assert pool(world, "agents-two") is not None
        world.plane.environments.gate._plugins = ()
        await world.until(lambda: pool(world, "agents-two") is None)


@pytest.mark.looptime
async def test_refused_growth_saturates_a_scaled_member_for_the_cooldown() -> None:
    async with paddock(pool_size=0) as world:
        world.plane.environments.gate._plugins = (AtMost(2),)
        group = ScalingGroup(min_replicas=6, saturation_cooldown_seconds=60)
        await world.provider.write.create(environment({"one": member()}, group=group))
        await asyncio.sleep(45)
        await idle(world, "agents-one", 2)
        made = pool(world, "agents-one")
        assert made is not None
        state = made.status.autoscaling
        assert state is not None
        assert state.last_attempt_result == "JustRight"
        assert "it is full" in state.message
        world.plane.environments.gate._plugins = ()
        await idle(world, "agents-one", 6, seconds=120)


@pytest.mark.looptime
async def test_members_and_environments_share_one_quota_without_exceeding_it() -> None:
    async with paddock(pool_size=0) as world:
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 10)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))
        names = ("one", "two", "three")
        for name in names:
            members = {"a": member(4), "b": member(4)}
            await world.provider.write.create(environment(members, name=name))
        await asyncio.sleep(200)
        total = sum(
            len(world.plane.pool_members.members(item.key).available)
            for item in world.provider.pools()
        )
        assert total == 10


@pytest.mark.looptime
async def test_a_plugin_that_timed_out_is_skipped_for_a_while() -> None:
    gate = AdmissionGate([Hangs()])
    loop = asyncio.get_running_loop()
    started = loop.time()
    for _ in range(20):
        assert (await gate.size(ask(3))).outcome is AdmissionOutcome.FAILED
    assert loop.time() - started <= 6
