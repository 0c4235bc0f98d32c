"""SandboxClaims with another image or size on an environment: in-place updates."""

import pytest

from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.claim import (
    InplaceUpdate,
    SandboxClaim,
    SandboxClaimSpec,
    UpdatedResources,
)
from paddock.resources.kinds.sandbox import LABEL_POOL, Sandbox
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.simulated import Operation
from tests.controllers.env.make import ENV, environment, idle, member
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

KEY = Key("default", "some")
IMAGE = InplaceUpdate(image="team/other")
SMALL = InplaceUpdate(resources=UpdatedResources(cpu="1500m"))


async def claimed(world: World, **spec) -> SandboxClaim:
    wanted = SandboxClaim(
        metadata=ObjectMeta(name=KEY.name, namespace=KEY.namespace),
        spec=SandboxClaimSpec(template_name=ENV.name, **spec),
    )
    await world.provider.write.create(wanted)

    def found() -> SandboxClaim | None:
        return world.provider.get(SandboxClaim, KEY)

    def is_complete() -> bool:
        claim = found()
        return claim is not None and claim.status.phase.is_final

    await world.until(is_complete, seconds=200)
    claim = found()
    assert claim is not None
    return claim


def owned(world: World) -> list[Sandbox]:
    return [item for item in world.provider.sandboxes_of_claim(KEY) if not item.is_deleting]


@pytest.mark.parametrize("failures", [0, 1])
async def test_warm_sandboxes_get_the_image_also_after_a_failure(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RuntimeAgent, "can_update_image", lambda _self: True)
    async with paddock(pool_size=0, claim_images="team/*") as world:
        await world.provider.write.create(environment({"a": member(2), "b": member(2)}))
        await idle(world, "agents-a", 2)
        await idle(world, "agents-b", 2)
        for _ in range(failures):
            world.runtime.fail_next(Operation.UPDATE_IMAGE, InvalidError("it does not start"))
        done = await claimed(world, replicas=3, inplace_update=IMAGE)
        assert done.status.claimed_replicas == 3
        assert {item.status.image for item in owned(world)} == {"team/other"}
        claim_queue = world.plane.environments.claim_queue
        assert claim_queue.waiting(ENV).total == 0
        assert not claim_queue._granted_counts


async def test_only_members_that_can_be_resized_serve_the_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resize(_self, _sandbox, _template):
        return

    monkeypatch.setattr(RuntimeAgent, "can_resize", lambda _self, _now, _wanted: True)
    monkeypatch.setattr(RuntimeAgent, "resize", resize)
    async with paddock(pool_size=0) as world:
        members = {"big": member(2, instance_type="medium")}
        await world.provider.write.create(environment(members))
        await idle(world, "agents-big", 2)
        done = await claimed(world, replicas=2, inplace_update=SMALL)
        assert done.status.claimed_replicas == 2
        assert {item.metadata.labels[LABEL_POOL] for item in owned(world)} == {"agents-big"}
        assert {item.status.resources.cpu for item in owned(world)} == {"1500m"}


async def test_a_size_that_no_member_has_is_reported_at_the_claims_timeout() -> None:
    async with paddock(pool_size=0) as world:
        await world.provider.write.create(environment({"tiny": member(2, instance_type="nano")}))
        await idle(world, "agents-tiny", 2)
        done = await claimed(world, inplace_update=SMALL, claim_timeout_seconds=20)
        assert done.status.claimed_replicas == 0
        assert "agents-tiny cannot serve this claim: resources.cpu" in done.status.message
        assert len(world.plane.pool_members.members(Key("default", "agents-tiny")).available) == 2


async def test_an_image_that_cannot_be_applied_is_refused_at_once() -> None:
    async with paddock(pool_size=0, claim_images="team/*") as world:
        await world.provider.write.create(environment({"one": member(1)}))
        await idle(world, "agents-one", 1)
        done = await claimed(world, inplace_update=IMAGE)
        assert "an environment creates none for one claim" in done.status.message
        assert done.status.completion_time is not None
        assert done.status.claim_start_time is not None
        assert (done.status.completion_time - done.status.claim_start_time).total_seconds() < 1
