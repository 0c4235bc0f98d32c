"""Updating the image of a running pod: the patch, and when the update is complete."""

import asyncio
import json

import pytest
from msgspec import structs

from paddock.kit.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from paddock.resources import codec
from paddock.resources.kinds.pods import (
    ContainerState,
    ContainerStateTerminated,
    ContainerStatus,
    Pod,
    PodContainer,
    PodStatus,
)
from paddock.resources.meta import Key, with_meta
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.pods.image_update import failure_message
from paddock.runtime.port import InstanceState
from tests.runtime.kubernetes.test_driver import World

KEY = Key("team", "box-u1")
PULL = 'Failed to pull image "j": no such image'


class Server:
    """An API server that takes patches and serves events; its kubelet can be paused."""

    def __init__(self):
        self.patches = []
        self.events = []
        self.refusal = None
        self.cluster = None
        self.obeys = True

    async def request(self, verb, path, *, resource="", body=None, content_type=""):
        if verb == "GET":
            assert "/events?" in path
            return json.dumps({"items": self.events}).encode()
        assert (verb, path) == ("PATCH", "/api/v1/namespaces/team/pods/box-u1")
        if self.refusal is not None:
            raise self.refusal
        patch = json.loads(body)
        self.patches.append(patch)
        pod = self.cluster.objects["Pod", KEY]
        assert patch["metadata"]["uid"] == pod.metadata.uid
        marks = {**pod.metadata.annotations, **patch["metadata"]["annotations"]}
        image = patch["spec"]["containers"][0]["image"]
        wanted = structs.replace(pod.spec, containers=(PodContainer(name="sandbox", image=image),))
        await self.cluster.update(structs.replace(with_meta(pod, annotations=marks), spec=wanted))
        if self.obeys:
            asyncio.get_running_loop().call_soon(self.obey, image)
        return codec.encode(self.cluster.objects["Pod", KEY])

    def obey(self, image):
        """Report the new container as the kubelet does."""
        pod = self.cluster.objects["Pod", KEY]
        self.show(self.cluster.running(pod.metadata, image, "c-2").status)

    def show(self, status):
        pod = self.cluster.objects["Pod", KEY]
        new = self.cluster.objects["Pod", KEY] = structs.replace(pod, status=status)
        self.cluster.tell(pod, new)


@pytest.fixture
def world():
    server = Server()
    made = World(server)
    made.server, server.cluster = server, made.cluster
    return made


def follow(world):
    """Move the sidecar into the new container."""
    world.envd_client.main = "life-2"


async def test_only_the_main_container_is_replaced_and_the_incarnation_counts_up(world):
    before = await world.make()
    asyncio.get_running_loop().call_later(0.01, follow, world)
    world.envd_client.wait_ready = until_followed(world)

    after = await world.driver.update_image("u1", "j")

    [patch] = world.server.patches
    assert patch["spec"] == {"containers": [{"name": "sandbox", "image": "j"}]}
    assert patch["metadata"]["annotations"] == {
        names.ANNOTATION_REPLACED: "c-1 life-1",
        names.ANNOTATION_INCARNATION: "2",
    }
    assert (before.image, after.image) == ("i", "j")
    assert (after.state, after.incarnation) == (InstanceState.RUNNING, 2)
    assert after.address == before.address
    assert world.envd_client.configured["u1"][1] == world.blueprints["u1"].agent, (
        "envd is configured again"
    )
    assert await world.driver.update_image("u1", "j") == after
    assert len(world.server.patches) == 1


def until_followed(world):
    async def wait(uid, ip, *, seconds, former=""):
        while world.envd_client.main == former:
            await asyncio.sleep(0.001)

    return wait


async def test_the_former_container_is_not_taken_for_the_new_one(world):
    await world.make()
    world.server.obeys = False
    updating = asyncio.create_task(world.driver.update_image("u1", "j"))
    while not world.server.patches:
        await asyncio.sleep(0)
    seen = await world.driver.inspect("u1")
    assert seen.state is InstanceState.CREATING
    assert "image j" in (seen.reason or "")
    world.server.obey("j")
    with pytest.raises(UnavailableError, match="envd is in the former container"):
        await updating
    follow(world)
    assert (await world.driver.update_image("u1", "j")).image == "j"


async def test_an_image_that_cannot_be_pulled_fails_with_the_kubelets_reason(world):
    await world.make()
    world.server.obeys = False
    world.server.events = [
        {"reason": "Failed", "message": PULL},
        {"reason": "Failed", "message": "Error: ErrImagePull"},
    ]
    updating = asyncio.create_task(world.driver.update_image("u1", "j"))
    while not world.server.patches:
        await asyncio.sleep(0)
    over = ContainerStatus(
        name="sandbox",
        container_id="c-1",
        state=ContainerState(terminated=ContainerStateTerminated()),
    )
    world.server.show(PodStatus(phase="Succeeded", container_statuses=(over,)))
    with pytest.raises(InvalidError, match="could not restart it from image j") as failed:
        await updating
    assert failed.value.message.endswith(PULL)
    assert (await world.driver.inspect("u1")).state is InstanceState.FAILED


async def test_a_rejected_patch_and_a_frozen_sandbox_keep_the_image(world):
    await world.make()
    world.server.refusal = InvalidError("pod updates may not change fields")
    with pytest.raises(UnsupportedError, match="rejects a new image"):
        await world.driver.update_image("u1", "j")
    pod = world.cluster.objects["Pod", KEY]
    frozen = with_meta(pod, annotations={names.ANNOTATION_FROZEN: "true"})
    await world.cluster.update(frozen)
    with pytest.raises(ConflictError):
        await world.driver.update_image("u1", "j")
    with pytest.raises(NotFoundError):
        await world.driver.update_image("u2", "j")
    assert (await world.driver.inspect("u1")).image == "i"


async def test_without_api_access_image_updates_are_unsupported():
    world = World()
    await world.make()
    can = await world.driver.capabilities()
    assert not can.can_update_image
    assert can.reasons["can_update_image"]
    with pytest.raises(UnsupportedError):
        await world.driver.update_image("u1", "j")
    assert isinstance(world.cluster.objects["Pod", KEY], Pod)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], ""),
        ([{"reason": "Failed", "message": "Error: ErrImagePull"}], "Error: ErrImagePull"),
        ([{"reason": "BackOff", "message": "Back-off"}, {"reason": "Failed"}], ""),
        (
            [
                {"reason": "Failed", "message": PULL},
                {"reason": "Failed", "message": "Error: ErrImagePull"},
            ],
            PULL,
        ),
    ],
)
def test_the_most_specific_failure_is_returned(events, said):
    assert failure_message(events) == said
