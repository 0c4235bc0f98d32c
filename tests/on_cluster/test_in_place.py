"""Claims that change running warm pods in place, with real roles on a real API server."""

import asyncio
from typing import Any

import aiohttp
import pytest

from paddock.kit.tasks import background
from paddock.resources import quantity
from paddock.resources.kinds.claim import (
    InplaceUpdate,
    SandboxClaim,
    SandboxClaimSpec,
    UpdatedResources,
)
from paddock.resources.kinds.pods import PodManifest
from paddock.resources.kinds.sandbox import IdlePause, Phase, Sandbox
from paddock.resources.meta import ObjectMeta, condition
from tests.cluster.pod_status import normal
from tests.on_cluster.world.installation import API_KEY, Installation

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

LEASE = 60
"""Long enough that the leader stays: a new leader restarts the idle timers."""
IMAGE = "e2b.agents.kruise.io/image"
OTHER = "other:2"
MEMORY = "paddock.dev/memory-limit"
IDLE = "IdlePaused"


async def create(paddock: Installation, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Create a sandbox at a replica of the API."""
    url = f"http://127.0.0.1:{paddock.api_ports[0]}/sandboxes"
    wanted = {"templateID": "base", "timeout": 300, **body}
    async with (
        aiohttp.ClientSession(headers={"X-API-Key": API_KEY}) as http,
        http.post(url, json=wanted) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_claim_with_another_image_updates_a_warm_pod(paddock: Installation) -> None:
    await paddock.stocked(2)
    warm = {item.metadata.uid for item in await paddock.idle()}
    started = len(paddock.kubelet.started)

    said = await paddock.sdk(
        """
box = Sandbox.create(envs={"COLOUR": "green"}, metadata={os.environ["KEY"]: os.environ["IMAGE"]})
ran = box.commands.run("cat /etc/image; echo; echo $COLOUR")
box.files.write("/tmp/hello", "world")
print(json.dumps([box.sandbox_id, ran.stdout, box.files.read("/tmp/hello")]))
""",
        KEY=IMAGE,
        IMAGE=OTHER,
    )

    sandbox_id, output, content = said
    assert output.split() == [OTHER, "green"], "commands run in the new container"
    assert content == "world"
    box = await paddock.sandbox(sandbox_id)
    assert box.metadata.uid in warm, "it was a warm one"
    assert box.metadata.name in paddock.kubelet.started[:started]
    assert (box.spec.image, box.status.image, box.status.incarnation) == (OTHER, OTHER, 2)
    pod = await paddock.store.get(PodManifest, box.key)
    shown = paddock.info.request("GET", f"/api/v1/namespaces/default/pods/{box.metadata.name}")
    [status] = shown["status"]["containerStatuses"]
    assert (status["image"], status["restartCount"]) == (normal(OTHER), 1)
    assert pod.spec["containers"][0]["image"] == OTHER


async def test_an_image_that_cannot_be_pulled_fails_the_claim_and_leaves_nothing(
    paddock: Installation,
) -> None:
    await paddock.stocked(1)
    before = {item.metadata.uid for item in await paddock.sandboxes()}

    status, answer = await create(paddock, {"metadata": {IMAGE: "missing:1"}})

    assert status == 503, answer
    assert "'missing:1' could not be started" in answer["message"]
    assert 'Failed to pull image "missing:1": no such image' in answer["message"]

    async def is_gone() -> bool:
        left = [item for item in await paddock.sandboxes() if item.metadata.uid in before]
        return not any(item.spec.image == "missing:1" for item in left)

    await paddock.eventually(is_gone)


async def test_a_start_command_runs_again_in_the_new_container(paddock: Installation) -> None:
    await paddock.template("starts", start_command="cat /etc/image > /tmp/began; sleep 1000")
    await paddock.pool("starts", 1)

    await paddock.stocked(1, "starts")
    said = await paddock.sdk(
        """
box = Sandbox.create("starts", metadata={os.environ["KEY"]: os.environ["IMAGE"]})
while not box.files.exists("/tmp/began") or not box.files.read("/tmp/began"):
    time.sleep(0.1)
print(json.dumps([box.sandbox_id, box.files.read("/tmp/began")]))
""",
        KEY=IMAGE,
        IMAGE=OTHER,
    )
    assert said[1].strip() == OTHER
    assert (await paddock.sandbox(said[0])).status.incarnation == 2


async def claim_memory(paddock: Installation, memory: str) -> tuple[bool, Sandbox, dict[str, Any]]:
    """Claim with this memory; return whether it was warm, the sandbox, and its pod."""
    await paddock.stocked(2)
    warm = {item.metadata.uid for item in await paddock.idle()}
    status, answer = await create(paddock, {"metadata": {MEMORY: memory}})
    assert status == 201, answer
    box = await paddock.sandbox(answer["sandboxID"])
    pod = await paddock.store.get(PodManifest, box.key)
    return box.metadata.uid in warm, box, pod.spec["resources"]["limits"]


@pytest.mark.parametrize("memory", ["512Mi", "128Mi"])
async def test_the_memory_of_a_warm_pod_is_resized_in_place(
    paddock: Installation, memory: str
) -> None:
    await paddock.kubelet.enable_resize()
    was_warm, box, limits = await claim_memory(paddock, memory)
    assert was_warm
    assert limits["memory"] == str(quantity.whole(memory))
    assert box.spec.resources is not None
    assert box.spec.resources.memory == memory


@pytest.mark.parametrize("answer", ["Deferred", "Infeasible"])
async def test_a_claim_succeeds_although_the_node_refuses_the_resize(
    paddock: Installation, answer: str
) -> None:
    await paddock.kubelet.enable_resize()
    paddock.kubelet.resizes = answer
    try:
        was_warm, box, limits = await claim_memory(paddock, "512Mi")
    finally:
        paddock.kubelet.resizes = ""
    assert not was_warm
    assert limits["memory"] == str(512 << 20)
    assert box.status.phase is Phase.RUNNING


async def test_more_memory_than_allowed_is_rejected(paddock: Installation) -> None:
    status, answer = await create(paddock, {"metadata": {MEMORY: "2Gi"}})
    assert status == 400
    assert "at most" in answer["message"]


def objects_of_events(paddock: Installation, reason: str) -> set[str]:
    """Return the objects of events with this reason."""
    events = paddock.info.request("GET", "/api/v1/namespaces/default/events")["items"]
    return {item["involvedObject"]["name"] for item in events if item["reason"] == reason}


async def test_a_declared_claim_changes_warm_pods_as_they_run(paddock: Installation) -> None:
    await paddock.kubelet.enable_resize()
    size = UpdatedResources(memory="512Mi")
    claim = SandboxClaim(
        metadata=ObjectMeta(name="changed", namespace="default"),
        spec=SandboxClaimSpec(
            template_name="base",
            replicas=2,
            create_on_no_stock=False,
            claim_timeout_seconds=90,
            wait_ready_timeout_seconds=60,
            inplace_update=InplaceUpdate(image=OTHER, resources=size),
        ),
    )
    await paddock.store.create(claim)

    async def is_complete() -> bool:
        found = await paddock.store.get(SandboxClaim, claim.key)
        return found.status.phase.is_final

    await paddock.eventually(is_complete)
    done = await paddock.store.get(SandboxClaim, claim.key)
    assert done.status.claimed_replicas == 2, done.status
    updated = condition(done.status.conditions, "InplaceUpdate")
    assert updated is not None
    assert updated.reason == "InPlace"
    for got in done.status.sandboxes:
        box = await paddock.sandbox(got.sandbox_id)
        pod = await paddock.store.get(PodManifest, box.key)
        assert box.metadata.labels["paddock.dev/pool"] == "base", "it was in stock"
        assert (box.spec.image, box.status.image, box.status.incarnation) == (OTHER, OTHER, 2)
        assert box.status.resources.memory == "512Mi"
        assert pod.spec["resources"]["limits"]["memory"] == str(512 << 20)
        assert pod.spec["containers"][0]["image"] == OTHER


async def keep_active(paddock: Installation, sandbox_id: str) -> None:
    """Send a request to a sandbox's envd every second, through the second gateway."""
    url = f"http://127.0.0.1:{paddock.gateway_ports[1]}/health"
    headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"}
    async with aiohttp.ClientSession(headers=headers) as http:
        while True:
            async with http.get(url) as answer:
                assert answer.status < 300, await answer.text()
            await asyncio.sleep(1)


async def test_idle_sandboxes_are_paused_unless_any_gateway_has_traffic(
    paddock: Installation,
) -> None:
    async with paddock.node_agent():
        wish = {"metadata": {"paddock.dev/idle-pause": "20s"}}
        quiet, busy = [(await create(paddock, wish))[1]["sandboxID"] for _ in range(2)]
        assert (await paddock.sandbox(quiet)).spec.idle_pause == IdlePause(after_seconds=20)
        async with background(keep_active(paddock, busy), name="traffic") as talking:

            async def is_paused() -> bool:
                assert not talking.done(), talking.result()
                return (await paddock.sandbox(quiet)).status.phase is Phase.PAUSED

            await paddock.eventually(is_paused)
            still = await paddock.sandbox(busy)
            assert (still.status.phase, still.spec.paused) == (Phase.RUNNING, False)
            before = still.metadata.resource_version
            await asyncio.sleep(7)
            after = (await paddock.sandbox(busy)).metadata.resource_version
            assert after == before, "traffic is written to nothing"
        name = (await paddock.sandbox(quiet)).metadata.name
        # Events are batched before they are written.
        await paddock.until(lambda: name in objects_of_events(paddock, IDLE))
        # Traffic wakes it.
        said = 'print(json.dumps(Sandbox.connect(os.environ["ID"]).commands.run("echo a").stdout))'
        assert await paddock.sdk(said, ID=quiet) == "a\n"
