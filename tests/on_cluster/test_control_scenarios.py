"""The control scenarios, unmodified, on a real API server with two replicas of every role.

Requests go to the replicas of the API in turn. Scenarios with store failures, probes and long waits
are in `test_trouble_scenarios`; skipped ones are named below.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import ConflictError, QuotaExceededError
from paddock.kit.tasks import background
from paddock.resources.kinds.env import SandboxEnv, ScalingGroup
from paddock.resources.kinds.sandbox import LABEL_POOL, Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.store.port import Change
from tests.cluster.control_plane import KubeCluster
from tests.controllers.env.make import environment, member
from tests.on_cluster.test_trouble_scenarios import ONLY
from tests.on_cluster.world.adopted_scenarios import ShortenedAsyncio, scenarios
from tests.on_cluster.world.control_world import LEAST_PATIENCE_SECONDS, ClusterWorld, running
from tests.on_cluster.world.installation import Installation
from tests.on_cluster.world.light_pods import LightKubelet
from tests.scenario import (
    test_claims,
    test_concurrent_calls,
    test_lifecycle,
    test_nothing_is_lost,
    test_pools,
    test_waking,
)
from tests.scenario.paddock import CALLER

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

MODULES = (
    test_lifecycle,
    test_claims,
    test_pools,
    test_concurrent_calls,
    test_waking,
    test_nothing_is_lost,
)
_NO_SNAPSHOTS = "pods have no snapshots"
_RUNTIME = "puts something else in the place of a runtime's method, inside of a process"
_KEYRING = "calls the keyring of a process, and lets it note the use of keys when it says so"
WITHOUT = {
    "test_sandboxes_are_created_from_a_snapshot_and_cloned_by_a_fork": _NO_SNAPSHOTS,
    "test_two_hundred_creates_on_a_pool_of_fifty_never_share_a_sandbox": "see below: fewer pods",
    "test_lists_are_paged_and_filtered": "calls the manager's list, which is no request; see below",
    "test_deadlines_that_passed_during_a_downtime_are_applied_afterwards": (
        "ends one control plane and begins another; test_trouble_scenarios does so with processes"
    ),
    "test_claims_share_the_creation_rate_with_others": (
        "sets a rate that all scenarios share here"
    ),
    "test_a_sandbox_with_idle_pause_is_paused_when_idle_and_not_before": (
        "puts into a control plane what gateways and nodes would tell it"
    ),
    "test_a_woken_sandbox_that_shuts_down_has_a_deadline": (
        "creates what the API refuses: only a declared sandbox wakes and ends at its timeout"
    ),
    "test_a_pool_whose_sandboxes_fail_backs_off_and_recovers": "backs off for most of a minute",
    "test_a_pause_without_memory_does_not_change_the_strategy": (
        "stops a pod that has no volume for its files, which is refused"
    ),
    "test_a_resume_that_takes_longer_than_the_timeout_loses_nothing": _RUNTIME,
    "test_hanging_node_operations_do_not_block_other_sandboxes": _RUNTIME,
    "test_the_quota_of_a_killed_sandbox_is_free_when_kill_returns": _RUNTIME,
    "test_a_failed_pause_leaves_the_sandbox_running_with_a_deadline": _RUNTIME,
    "test_a_deleted_claim_leaves_no_quota_reserved_after_a_lost_reply": (
        "reads what one process has reserved"
    ),
    "test_writing_a_keys_last_use_undoes_no_change_and_revives_no_key": _KEYRING,
    "test_an_unavailable_store_stops_no_background_work": _KEYRING,
}
"""All of `test_checkpoints`: it is about snapshots."""
CASES = {
    "test_mixed_pauses_and_resumes_end_in_a_consistent_state": (
        lambda case: case in (0, 1, PauseStrategy.FREEZE)
    ),
    "test_a_kill_wins_over_pauses_and_resumes_and_leaves_nothing": lambda case: case in (0, 1),
}
globals().update(scenarios(MODULES, without=WITHOUT, elsewhere=ONLY, cases=CASES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(own_cluster: KubeCluster) -> AsyncGenerator[ClusterWorld]:
    """An installation, used through both replicas of its API in turn."""
    async with contextlib.AsyncExitStack() as stack:
        paddock = await stack.enter_async_context(
            Installation(own_cluster.info, LightKubelet, lease_seconds=15)
        )
        await stack.enter_async_context(paddock.node_agent())
        yield await stack.enter_async_context(running(paddock, paddock.api_ports))


@pytest.fixture(autouse=True)
def on_a_cluster(world: ClusterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the world of the scenarios by this one."""

    @contextlib.asynccontextmanager
    async def paddock(
        *, pool_size: int = 2, runtime: Any = None, **settings: Any
    ) -> AsyncGenerator[ClusterWorld]:
        if settings:
            pytest.skip(f"it sets {', '.join(settings)}, which all scenarios share here")
        await world.begin(pool_size)
        try:
            yield world
        finally:
            await world.end()

    for module in MODULES:
        monkeypatch.setattr(module, "paddock", paddock)
        monkeypatch.setattr(module, "asyncio", ShortenedAsyncio())


async def test_creates_beyond_the_pool_through_both_replicas_never_share_a_sandbox(
    world: ClusterWorld,
) -> None:
    await world.begin(pool_size=12)
    try:
        await world.stocked(12)
        wanted = NewSandbox(template="base")
        made = await asyncio.gather(
            *(world.manager.claims.create(CALLER, wanted) for _ in range(48))
        )
        assert len({item.metadata.uid for item in made}) == 48
        assert len({item.spec.claim.sandbox_id for item in made if item.spec.claim}) == 48
        # The pool is refilled.
        await world.stocked(12)
    finally:
        await world.end()


async def test_lists_of_both_replicas_are_paged_and_filtered_alike(
    world: ClusterWorld,
) -> None:
    await world.begin(pool_size=2)
    try:
        made = set()
        for number in range(5):
            wanted = NewSandbox(template="base", metadata={"n": str(number % 2)})
            box = await world.manager.claims.create(CALLER, wanted)
            assert box.spec.claim is not None
            made.add(box.spec.claim.sandbox_id)
        odd = await world.http.get("/v2/sandboxes", params={"metadata": "n=1"})
        assert len(odd.json()) == 2
        # Each page comes from the other replica.
        seen: list[str] = []
        params = {"limit": "2"}
        while True:
            page = await world.http.get("/v2/sandboxes", params=params)
            seen += [item["sandboxID"] for item in page.json()]
            if "x-next-token" not in page.headers:
                break
            params["nextToken"] = page.headers["x-next-token"]
        assert len(seen) == 5
        assert set(seen) == made
    finally:
        await world.end()


class ClaimWatcher:
    """The numbers of claimed and of running sandboxes at every resource version."""

    def __init__(self) -> None:
        self.now = self.most = self.most_running = 0
        self._claimed: dict[str, bool] = {}

    async def follow(self, store: Any) -> None:
        async with contextlib.aclosing(store.watch(Sandbox)) as events:
            async for event in events:
                if event.object is not None:
                    self._take(event.change, event.object)

    def _take(self, change: Change, box: Sandbox) -> None:
        self._claimed.pop(box.metadata.uid, None)
        is_gone = change is Change.DELETED or box.is_deleting
        if not is_gone and box.spec.claim is not None:
            self._claimed[box.metadata.uid] = not box.spec.paused
        self.now = len(self._claimed)
        self.most = max(self.most, self.now)
        self.most_running = max(self.most_running, sum(self._claimed.values()))


def id_of(sandbox: Sandbox) -> str:
    assert sandbox.spec.claim is not None
    return sandbox.spec.claim.sandbox_id


async def test_a_snapshot_of_a_pod_is_rejected_with_the_reason(world: ClusterWorld) -> None:
    await world.begin(pool_size=1)
    try:
        box = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        answer = await world.http.post(f"/sandboxes/{id_of(box)}/snapshots", json={})
        assert answer.status_code == 501, answer.text
        assert "snapshot" in answer.json()["message"]
        # The sandbox is unchanged.
        assert (await world.manager.queries.get(CALLER, id_of(box))).status.phase is Phase.RUNNING
    finally:
        await world.end()


async def test_a_storm_on_both_replicas_uses_the_whole_quota_and_never_exceeds_it(
    world: ClusterWorld,
) -> None:
    wanted = NewSandbox(template="base", timeout_seconds=None)
    await world.begin(pool_size=6)
    try:
        await world.stocked(6)
        limits = (
            QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 10),
            QuotaLimit(Dimension.COUNT, QuotaScope.RUNNING, 8),
        )
        await world.plane.keyring.set_team_quota("default", Quota(limits))
        watched = ClaimWatcher()
        async with background(watched.follow(world.store), name="watch"):

            async def client() -> None:
                mine: list[str] = []
                for turn in range(4):
                    try:
                        if turn == 2 and mine:
                            await world.manager.lifecycle.pause(CALLER, mine[0])
                            await world.manager.lifecycle.connect(
                                CALLER, mine[0], timeout_seconds=600
                            )
                        elif turn == 3 and mine:
                            await world.manager.lifecycle.kill(CALLER, mine.pop())
                        else:
                            mine.append(id_of(await world.manager.claims.create(CALLER, wanted)))
                    except (QuotaExceededError, ConflictError):
                        continue

            await asyncio.gather(*(client() for _ in range(16)))
            assert watched.most <= 10
            assert watched.most_running <= 8
            # A client that retries gets the last one from either replica.
            limits = (QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 10),)
            await world.plane.keyring.set_team_quota("default", Quota(limits))
            async with asyncio.timeout(LEAST_PATIENCE_SECONDS):
                while watched.now < 10:
                    with contextlib.suppress(QuotaExceededError):
                        await world.manager.claims.create(CALLER, wanted)
            assert watched.most == 10
    finally:
        await world.end()


async def test_a_claim_queued_at_a_replica_scales_up_its_environment(
    world: ClusterWorld,
) -> None:
    """The leader is another process: it reads the claim from the environment's status."""
    await world.begin(pool_size=0)
    env = environment({"one": member()}, group=ScalingGroup())
    try:
        await world.provider.write.create(env)
        async with asyncio.timeout(LEAST_PATIENCE_SECONDS):
            while not (await world.store.get(SandboxEnv, env.key)).status.clusters:
                await asyncio.sleep(0.1)
        box = await world.manager.claims.create(CALLER, NewSandbox(template=env.metadata.name))
        assert box.metadata.labels[LABEL_POOL] == "agents-one"
    finally:
        await world.store.delete(SandboxEnv, env.key)
        await world.end()


async def test_one_idempotency_key_sent_to_both_replicas_at_once_gives_one_sandbox(
    world: ClusterWorld,
) -> None:
    await world.begin(pool_size=4)
    try:
        for number in range(5):
            wanted = NewSandbox(template="base", idempotency_key=f"both-{number}")
            made = await asyncio.gather(
                *(world.manager.claims.create(CALLER, wanted) for _ in range(6))
            )
            assert len({item.metadata.uid for item in made}) == 1
        found = (await world.store.list(Sandbox)).items
        assert len([item for item in found if item.spec.claim is not None]) == 5
    finally:
        await world.end()
