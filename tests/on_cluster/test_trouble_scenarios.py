"""The control scenarios about failures, unmodified, on a real API server with two of every role.

A proxy between the roles and the API server rejects, delays and loses writes as scenarios require;
probe results are set by scenarios. Waits of minutes of virtual time are shortened to seconds.
"""

import contextlib
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import RateLimitedError
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import Probe, SandboxTemplate
from tests.cluster.control_plane import KubeCluster
from tests.on_cluster.world.adopted_scenarios import ShortenedAsyncio, scenarios
from tests.on_cluster.world.control_world import BASE, ClusterWorld, running
from tests.on_cluster.world.installation import Installation
from tests.on_cluster.world.intercepting_proxy import InterceptingProxy
from tests.on_cluster.world.light_pods import LightKubelet
from tests.scenario import (
    test_claims,
    test_concurrent_calls,
    test_nothing_is_lost,
    test_pools,
    test_probing,
    test_store_faults,
)
from tests.scenario.paddock import CALLER

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

MODULES = (
    test_store_faults,
    test_probing,
    test_concurrent_calls,
    test_nothing_is_lost,
    test_claims,
    test_pools,
)
ONLY = {
    "test_no_sandbox_is_claimed_twice_and_no_quota_exceeded_under_store_faults",
    "test_mixed_pauses_and_resumes_survive_store_faults",
    "test_a_lost_reply_neither_leaks_quota_nor_grants_one_too_many",
    "test_stock_returns_after_the_store_was_unavailable",
    "test_a_timeout_set_while_paused_never_ends_a_paused_sandbox",
    "test_a_resume_whose_write_failed_does_not_use_up_the_quota",
    "test_a_sandbox_that_fails_its_probes_in_a_row_is_replaced",
    "test_single_probe_failures_are_tolerated",
    "test_claimed_sandboxes_are_not_probed",
    "test_a_completed_claim_is_final_and_deleted_after_its_ttl_without_its_sandboxes",
    "test_a_claim_is_limited_by_its_teams_quota_and_reports_it",
    "test_idle_sandboxes_are_replaced_when_they_are_too_old",
}
PROBE = Probe(command="true", period_seconds=4, timeout_seconds=4, failure_threshold=4)
"""Failure threshold with a margin for one slow probe."""
HASTY = structs.replace(PROBE, timeout_seconds=3, failure_threshold=3)
"""For scenarios about sandboxes that do not answer."""
MUTE_SECONDS = 4.0
"""Longer than the timeout of a hasty probe, but not long enough to fail a second one."""
SHORTER = {
    (test_claims, "TTL_SECONDS"): 20,
    (test_claims, "CLAIM_SECONDS"): 16,
    (test_pools, "IDLE_SECONDS"): 30,
}
CASES = {
    "test_no_sandbox_is_claimed_twice_and_no_quota_exceeded_under_store_faults": (
        lambda case: case in (0, 1)
    ),
    "test_mixed_pauses_and_resumes_survive_store_faults": (lambda case: case in (0, 1)),
}

globals().update(scenarios(MODULES, without={}, only=ONLY, cases=CASES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(own_cluster: KubeCluster) -> AsyncGenerator[ClusterWorld]:
    """An installation behind an intercepting proxy."""
    async with contextlib.AsyncExitStack() as stack:
        wire = await stack.enter_async_context(InterceptingProxy(own_cluster).run())
        paddock = await stack.enter_async_context(
            Installation(own_cluster.info, LightKubelet, lease_seconds=15, server=wire.url)
        )
        await stack.enter_async_context(paddock.node_agent())
        yield await stack.enter_async_context(running(paddock, paddock.api_ports, wire))


@pytest.fixture(autouse=True)
def on_a_cluster(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Replace the world of the scenarios by this one."""

    @contextlib.asynccontextmanager
    async def paddock(
        *, pool_size: int = 2, runtime: Any = None, store: Any = None
    ) -> AsyncGenerator[ClusterWorld]:
        await world.begin(pool_size)
        if store is not None:
            world.store.behave_like(store)
        try:
            yield world
        finally:
            await world.end()

    for module in MODULES:
        monkeypatch.setattr(module, "paddock", paddock)
        monkeypatch.setattr(module, "asyncio", ShortenedAsyncio())
    monkeypatch.setattr(test_probing, "asyncio", ShortenedAsyncio(MUTE_SECONDS))
    is_about_waiting = "mute" in request.node.name
    monkeypatch.setattr(test_probing, "PROBE", HASTY if is_about_waiting else PROBE)
    for (module, name), value in SHORTER.items():
        monkeypatch.setattr(module, name, value)


async def test_a_sandbox_that_was_never_healthy_is_never_claimed(world: ClusterWorld) -> None:
    await world.begin(pool_size=0)
    asked: set[str] = set()

    async def sick(sandbox: Sandbox, _probe: Probe) -> str:
        asked.add(sandbox.metadata.uid)
        return "a cold"

    try:
        world.plane.controllers.probes._prober = sick
        await world.provider.write.mutate(
            SandboxTemplate,
            BASE,
            lambda item: structs.replace(item, spec=structs.replace(item.spec, probe=PROBE)),
        )
        await world.resized(2)
        await world.until(lambda: len(asked) >= 2)
        wanted = NewSandbox(template="base", create_on_no_stock=False, claim_timeout_seconds=3)
        for _ in range(2):
            with pytest.raises(RateLimitedError):
                await world.manager.claims.create(CALLER, wanted)
        assert not world.plane.pool_members.members(BASE).available
    finally:
        await world.end()


async def test_deadlines_that_passed_without_controllers_are_met_afterwards(
    world: ClusterWorld,
) -> None:
    await world.begin(pool_size=2)
    names = ("controllers-0", "controllers-1")

    def start_all() -> None:
        for number, name in enumerate(names):
            if name not in world.paddock.processes:
                world.paddock.start("controllers", number)

    try:
        await world.stocked(2)
        made = [
            await world.manager.claims.create(
                CALLER, NewSandbox(template="base", timeout_seconds=600, auto_pause=auto_pause)
            )
            for auto_pause in (False, True)
        ]
        for name in names:
            # On SIGTERM they release their lease, so the next process leads at once.
            await world.paddock.kill(name, signal.SIGTERM)
        # Not before: controllers that end slowly must not see the deadline pass.
        ending, pausing = [
            await world.manager.lifecycle.set_timeout(
                CALLER, test_nothing_is_lost.id_of(box), timeout_seconds=3
            )
            for box in made
        ]
        ends = (ending.spec.shutdown_time, pausing.spec.pause_time)
        end = max(moment for moment in ends if moment is not None)
        await world.until(lambda: world.plane.clock.now() > end)
        assert world.provider.sandbox(ending.key) is not None
        start_all()
        await world.until(lambda: world.provider.sandbox(ending.key) is None)

        def is_paused() -> bool:
            box = world.provider.sandbox(pausing.key)
            return box is not None and box.status.phase is Phase.PAUSED

        await world.until(is_paused)
    finally:
        start_all()
        await world.end()
