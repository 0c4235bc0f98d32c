"""The scenarios of batches and tasks, unmodified, on a real API server with two of every role.

Batches are allocated and their tasks are sent by the leading `controllers` process. Each pod has a
real envd, which runs the tasks. `test_real_kubelet` runs a batch in real pods.
"""

import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.cluster.control_plane import KubeCluster
from tests.controllers.batch import (
    test_api,
    test_pooled_batches,
    test_tasks,
    test_template_shards_and_pool_selection,
)
from tests.controllers.batch.make import Batches, batch, pool, task
from tests.on_cluster.world.adopted_scenarios import ShortenedAsyncio, scenarios
from tests.on_cluster.world.control_world import ClusterWorld, running
from tests.on_cluster.world.installation import Installation
from tests.on_cluster.world.task_pods import PodTasks, TaskKubelet

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

MODULES = (
    test_tasks,
    test_pooled_batches,
    test_template_shards_and_pool_selection,
    test_api,
)
ONLY = {
    "test_every_shard_runs_its_task_once_and_all_succeed",
    "test_a_shards_patch_changes_its_task_alone",
    "test_a_timeout_ends_a_task_and_is_its_reason",
    "test_with_release_a_shard_releases_its_sandbox_when_its_task_ends",
    "test_deleting_a_batch_stops_its_tasks_first",
    "test_sandboxes_of_a_batch_are_not_claimable",
    "test_concurrent_batches_share_no_sandbox_and_the_counts_add_up",
    "test_with_noop_the_same_sandboxes_are_reused",
    "test_a_lost_shard_is_replaced_and_keeps_its_index",
    "test_scale_in_releases_the_named_shards_and_scale_out_fills_the_gaps",
    "test_a_template_batch_creates_its_shards_with_their_patches",
    "test_a_template_batch_replaces_lost_shards_and_scales_both_ways",
    "test_one_call_creates_many_sandboxes",
    "test_gateways_find_a_shard_by_its_id",
}
"""The others set the runtime or the task runner of one process, or take more than ten seconds."""
globals().update(scenarios(MODULES, without={}, only=ONLY))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(own_cluster: KubeCluster) -> AsyncGenerator[ClusterWorld]:
    """An installation, used through both replicas of its API in turn."""
    async with contextlib.AsyncExitStack() as stack:
        paddock = await stack.enter_async_context(
            Installation(own_cluster.info, TaskKubelet, lease_seconds=15)
        )
        yield await stack.enter_async_context(running(paddock, paddock.api_ports))


@contextlib.asynccontextmanager
async def begun(world: ClusterWorld, pool_size: int = 0) -> AsyncGenerator[ClusterWorld]:
    """Set up the world for one scenario; remove everything afterwards."""
    kubelet = world.kubelet
    assert isinstance(kubelet, TaskKubelet)
    kubelet.runs.clear()
    watcher = SimpleNamespace(_runner=PodTasks(kubelet))
    world.plane.batches = SimpleNamespace(task_watcher=watcher)  # type: ignore[attr-defined]
    await world.begin(pool_size)
    try:
        yield world
    finally:
        await world.end()


@pytest.fixture(autouse=True)
def on_a_cluster(world: ClusterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the world of the scenarios by this one."""

    @contextlib.asynccontextmanager
    async def paddock(*, pool_size: int = 2) -> AsyncGenerator[ClusterWorld]:
        async with begun(world, pool_size) as it:
            yield it

    @contextlib.asynccontextmanager
    async def batching() -> AsyncGenerator[tuple[Any, Batches]]:
        async with begun(world) as it:
            yield it, Batches(it)  # type: ignore[arg-type]

    for module in MODULES:
        monkeypatch.setattr(module, "batching", batching)
        monkeypatch.setattr(module, "paddock", paddock, raising=False)
        monkeypatch.setattr(module, "asyncio", ShortenedAsyncio(), raising=False)


async def test_gateways_forward_the_task_api_and_require_the_token_of_the_sandbox(
    world: ClusterWorld,
) -> None:
    async with begun(world):
        batches = Batches(world)  # type: ignore[arg-type]
        await batches.create(pool("p", buffer=1, most=2))
        wanted = task("echo", "said by a task")
        await batches.create(batch("b", 1, pool_ref="p", owner="default", task_template=wanted))
        await world.until(lambda: batches.get("b").status.task_succeeded == 1)
        item = batches.get("b").status.allocations[0]
        shown = (await world.http.get(f"/sandboxes/{item.sandbox_id}")).json()
        name = f"b-0-{batches.get('b').metadata.uid[:8]}"
        sandbox = {"E2b-Sandbox-Id": item.sandbox_id, "E2b-Sandbox-Port": "5758"}
        token = {"X-Access-Token": shown["envdAccessToken"]}
        for port in world.paddock.gateway_ports:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as gateway:
                log = await gateway.get(f"/tasks/{name}/log", headers=sandbox | token)
                assert (log.status_code, log.text) == (200, "said by a task\n")
                for other in ({}, {"X-Access-Token": "wrong"}):
                    refused = await gateway.get("/tasks", headers=sandbox | other)
                    assert refused.status_code == 401
