"""Claims with another image: a warm sandbox changes its image in place if possible."""

import asyncio

import pytest
from msgspec import structs

from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import InvalidError, UnavailableError
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.sandbox import CONDITION_READY, Sandbox
from paddock.resources.meta import condition
from paddock.runtime.simulated import ALL_CAPABILITIES, Operation, SimulatedRuntime
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

OTHER = NewSandbox(template="base", image="team/other")


async def claimed(world: World, wanted: NewSandbox = OTHER) -> tuple[set[str], Sandbox]:
    """Claim a sandbox with another image; return the uids of the stock, and the sandbox."""
    await world.stocked(2)
    stock = {sandbox.metadata.uid for sandbox in world.provider.all(Sandbox)}
    return stock, await world.manager.claims.create(CALLER, wanted)


@pytest.fixture
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RuntimeAgent, "can_update_image", lambda _self: True)


@pytest.mark.usefixtures("_in_place")
async def test_a_warm_sandbox_changes_its_image_before_it_is_returned() -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        stock, sandbox = await claimed(world)
        assert sandbox.metadata.uid in stock
        assert sandbox.spec.image == sandbox.status.image == "team/other"
        instance = await world.runtime.inspect(sandbox.metadata.uid)
        assert instance is not None
        assert instance.image == "team/other"
        assert sandbox.status.incarnation == instance.incarnation == 2
        ready = condition(sandbox.status.conditions, CONDITION_READY)
        assert ready is not None
        assert ready.status == "True"
        assert world.runtime.agent(sandbox.metadata.uid).sandbox_id == sandbox.spec.claim.sandbox_id
        assert world.runtime.calls[Operation.UPDATE_IMAGE] == 1


async def test_a_sandbox_is_created_if_the_runtime_cannot_change_images() -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        stock, sandbox = await claimed(world)
        assert sandbox.metadata.uid not in stock
        assert sandbox.status.image == "team/other"
        assert world.runtime.calls[Operation.UPDATE_IMAGE] == 0


@pytest.mark.usefixtures("_in_place")
async def test_an_image_that_cannot_start_fails_the_claim_and_is_cleaned_up() -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        await world.stocked(2)
        world.runtime.fail_next(Operation.UPDATE_IMAGE, InvalidError("no such image"))
        with pytest.raises(UnavailableError, match=r"'team/other' could not be started.*no such"):
            await world.manager.claims.create(CALLER, OTHER)
        await world.until(lambda: not world.provider.sandboxes(CALLER.team))


@pytest.mark.usefixtures("_in_place")
async def test_an_image_change_waits_for_a_node_that_is_briefly_unavailable() -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        await world.stocked(2)
        world.runtime.fail_next(Operation.UPDATE_IMAGE)
        world.runtime.lose_reply_next(Operation.UPDATE_IMAGE)
        stock, sandbox = await claimed(world)
        assert sandbox.metadata.uid in stock
        assert sandbox.status.image == "team/other"
        assert sandbox.status.incarnation == 2, "restarted once, however often it was requested"


@pytest.mark.usefixtures("_in_place")
async def test_the_same_request_again_finds_the_same_sandbox() -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        wanted = structs.replace(OTHER, idempotency_key="once")
        _, first = await claimed(world, wanted)
        again = await world.manager.claims.create(CALLER, wanted)
        assert again.metadata.uid == first.metadata.uid


async def reasons(world: World) -> set[str]:
    return {event.reason for event in (await world.store.list(Event)).items}


async def test_an_unsupported_image_change_is_reported_and_the_sandbox_keeps_running() -> None:
    none = structs.replace(ALL_CAPABILITIES, can_update_image=False)
    runtime = SimulatedRuntime(clock=(clock := LoopClock()), capabilities=none)
    async with paddock(pool_size=2, runtime=runtime, clock=clock) as world:
        await world.stocked(1)
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="base"))

        def other(current: Sandbox) -> Sandbox:
            return structs.replace(current, spec=structs.replace(current.spec, image="x"))

        await world.provider.write.mutate(Sandbox, sandbox.key, other)
        async with asyncio.timeout(30):
            while "ImageUpdateRefused" not in await reasons(world):
                await asyncio.sleep(0.1)
        found = await world.manager.queries.get(CALLER, sandbox.spec.claim.sandbox_id)
        assert found.status.phase == "Running"
