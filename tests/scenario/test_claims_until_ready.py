"""SandboxClaims complete with ready sandboxes; those that fail are replaced."""

import asyncio
import random

import pytest
from msgspec import structs

from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.claims.quota.ledger import Dimension, QuotaScope
from paddock.kit.clock import LoopClock
from paddock.kit.errors import InvalidError, UnavailableError, UnsupportedError
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.claim import (
    InplaceUpdate,
    SandboxClaim,
    SandboxClaimSpec,
    UpdatedResources,
)
from paddock.resources.kinds.sandbox import LABEL_GIVEN_UP, Phase, Sandbox
from paddock.resources.kinds.template import Resources
from paddock.resources.meta import Key, ObjectMeta, condition
from paddock.runtime.simulated import ALL_CAPABILITIES, Operation, SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import World, paddock, resizing
from tests.scenario.test_store_faults import UnreliableStore

pytestmark = pytest.mark.looptime

KEY = Key("default", "some")
IMAGE = InplaceUpdate(image="team/other")
SMALL = InplaceUpdate(resources=UpdatedResources(cpu="500m"))


async def begin(world: World, **spec) -> set[str]:
    """Apply a claim; return the uids of the stock."""
    stock = {item.metadata.uid for item in world.provider.all(Sandbox)}
    wanted = SandboxClaim(
        metadata=ObjectMeta(name=KEY.name, namespace=KEY.namespace),
        spec=SandboxClaimSpec(template_name="base", **spec),
    )
    await world.provider.write.create(wanted)
    return stock


def found(world: World) -> SandboxClaim:
    claim = world.provider.get(SandboxClaim, KEY)
    assert claim is not None
    return claim


async def completed(world: World) -> SandboxClaim:
    await world.until(lambda: found(world).status.phase.is_final, seconds=200)
    return found(world)


def owned(world: World) -> tuple[Sandbox, ...]:
    return tuple(item for item in world.provider.sandboxes_of_claim(KEY) if not item.is_deleting)


def reason(claim: SandboxClaim, kind: str) -> str:
    shown = condition(claim.status.conditions, kind)
    return "" if shown is None else f"{shown.status} {shown.reason}"


async def said(world: World, word: str) -> str:
    """Wait for an Event of the claim; return its message."""
    async with asyncio.timeout(30):
        while True:
            for event in (await world.store.list(Event)).items:
                if event.reason == word and event.involved_object.name == KEY.name:
                    return event.message
            await asyncio.sleep(0.1)


@pytest.fixture
def _images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RuntimeAgent, "can_update_image", lambda _self: True)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[Resources]:
    return resizing(monkeypatch)


# ---- in place ----------------------------------------------------------------------------


@pytest.mark.usefixtures("_images")
async def test_warm_sandboxes_get_the_claims_image_and_are_handed_over_when_ready() -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        await world.stocked(2)
        world.runtime.set_latency(Operation.UPDATE_IMAGE, 5)
        stock = await begin(world, replicas=2, inplace_update=IMAGE)
        await asyncio.sleep(3)
        assert (found(world).status.phase, found(world).status.claimed_replicas) == ("Claiming", 0)
        done = await completed(world)
        assert done.status.claimed_replicas == len(done.status.sandboxes) == 2
        assert reason(done, "InplaceUpdate") == "True InPlace"
        assert reason(done, "Completed") == "True AllReplicasClaimed"
        for sandbox in owned(world):
            assert sandbox.metadata.uid in stock
            assert sandbox.spec.image == sandbox.status.image == "team/other"
            told = world.runtime.agent(sandbox.metadata.uid)
            assert sandbox.spec.claim is not None
            assert told.sandbox_id == sandbox.spec.claim.sandbox_id
        assert world.runtime.calls[Operation.UPDATE_IMAGE] == 2


async def test_warm_sandboxes_get_the_claims_size_and_report_it(
    sizes: list[Resources],
) -> None:
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        stock = await begin(world, replicas=2, inplace_update=SMALL)
        done = await completed(world)
        assert reason(done, "InplaceUpdate") == "True InPlace"
        assert [size.cpu for size in sizes] == ["500m", "500m"]
        for sandbox in owned(world):
            assert sandbox.metadata.uid in stock
            assert sandbox.spec.resources == sandbox.status.resources == sizes[0]
        assert world.plane.ledger.used("team:default", Dimension.CPU, QuotaScope.ALL) == 1000


async def test_sandboxes_are_created_where_warm_ones_cannot_be_updated() -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        await world.stocked(2)
        both = InplaceUpdate(image="team/other", resources=UpdatedResources(memory="128Mi"))
        stock = await begin(world, replicas=2, inplace_update=both)
        done = await completed(world)
        assert done.status.claimed_replicas == 2
        assert reason(done, "InplaceUpdate") == "False CreatedNew"
        assert "cannot change the image" in await said(world, "CreatedNew")
        for sandbox in owned(world):
            assert sandbox.metadata.uid not in stock
            assert sandbox.status.image == "team/other"
            assert sandbox.status.resources.memory == "128Mi"


# ---- refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param(
            {"inplace_update": IMAGE, "create_on_no_stock": False},
            "change the image of a warm sandbox, and none may be created: createOnNoStock is off",
            id="image of stock alone",
        ),
        pytest.param(
            {"inplace_update": SMALL, "create_on_no_stock": False},
            "this runtime cannot give a warm sandbox that size, and none may be created",
            id="size of stock alone",
        ),
        pytest.param(
            {"inplace_update": InplaceUpdate(image="evil/other")},
            "clients may not choose image 'evil/other' here; use a template of that image",
            id="image that nobody may choose",
        ),
        pytest.param(
            {"inplace_update": InplaceUpdate(resources=UpdatedResources(cpu="100"))},
            "resources.cpu: more than 0 and at most 2000m",
            id="more than there is",
        ),
    ],
)
async def test_an_impossible_request_is_refused_at_once_with_a_reason(spec, words: str) -> None:
    async with paddock(pool_size=2, claim_images="team/*") as world:
        await world.stocked(2)
        stock = await begin(world, **spec)
        done = await completed(world)
        assert words in done.status.message
        assert done.status.claimed_replicas == 0
        assert reason(done, "Failed") == "True InplaceUpdateRefused"
        assert reason(done, "InplaceUpdate") == "False Refused"
        assert words in await said(world, "InplaceUpdateRefused")
        assert {item.metadata.uid for item in world.provider.all(Sandbox)} == stock


# ---- failing -----------------------------------------------------------------------------


@pytest.mark.usefixtures("_images")
async def test_a_sandbox_that_cannot_start_its_image_is_replaced() -> None:
    async with paddock(pool_size=3, claim_images="team/*") as world:
        await world.stocked(3)
        world.runtime.fail_next(Operation.UPDATE_IMAGE, InvalidError("its disk is full"))
        await begin(world, replicas=2, inplace_update=IMAGE)
        done = await completed(world)
        assert done.status.claimed_replicas == 2
        assert (done.status.failures, done.status.backoff_until) == (0, None)
        assert "its disk is full" in await said(world, "SandboxGivenUp")
        await world.until(lambda: len(world.provider.sandboxes_of_claim(KEY)) == 2)
        assert all(item.status.image == "team/other" for item in owned(world))
        assert world.plane.ledger.used("team:default", Dimension.COUNT, QuotaScope.ALL) == 2


@pytest.mark.usefixtures("_images")
async def test_an_image_that_never_starts_uses_little_stock_and_is_reported() -> None:
    async with paddock(pool_size=4, claim_images="team/*") as world:
        await world.stocked(4)
        for _ in range(50):
            world.runtime.fail_next(Operation.UPDATE_IMAGE, InvalidError("no such image"))
        await begin(world, replicas=4, inplace_update=IMAGE, claim_timeout_seconds=60)
        done = await completed(world)
        assert done.status.claimed_replicas == 0
        assert reason(done, "TimedOut") == "True ClaimTimeoutReached"
        assert "0 of 4 claimed in time" in done.status.message
        assert "no such image" in done.status.message
        assert 4 < world.runtime.calls[Operation.UPDATE_IMAGE] <= 9, "one at a time, ever later"
        await world.until(lambda: not world.provider.sandboxes_of_claim(KEY))


async def test_a_refused_size_costs_one_sandbox_and_not_the_claim(
    sizes: list[Resources], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_self, sandbox, _template):
        raise UnsupportedError(f"the node of {sandbox.key} is full")

    monkeypatch.setattr(RuntimeAgent, "resize", refuse)
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        stock = await begin(world, replicas=1, inplace_update=SMALL)
        began = asyncio.get_running_loop().time()
        done = await completed(world)
        assert asyncio.get_running_loop().time() - began < 2, "a new one is created at once"
        assert done.status.claimed_replicas == 1
        assert reason(done, "InplaceUpdate") == "False CreatedNew"
        [sandbox] = owned(world)
        assert sandbox.metadata.uid not in stock
        assert sandbox.status.resources.cpu == "500m"
        assert "is full" in await said(world, "SandboxGivenUp")


async def test_a_resize_is_retried_while_the_runtime_is_unavailable(
    sizes: list[Resources], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, attempts = RuntimeAgent.resize, iter((False, False, True))

    async def lossy(self, sandbox, template):
        if not next(attempts):
            raise UnavailableError("no answer")
        await real(self, sandbox, template)

    monkeypatch.setattr(RuntimeAgent, "resize", lossy)
    async with paddock(pool_size=1) as world:
        await world.stocked(1)
        stock = await begin(world, inplace_update=SMALL)
        done = await completed(world)
        assert done.status.claimed_replicas == 1
        assert [item.metadata.uid in stock for item in owned(world)] == [True]
        assert len(sizes) == 1


async def test_a_resize_that_a_crash_interrupted_is_done_afterwards(
    sizes: list[Resources], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock()
    store, runtime = MemoryStore(clock=clock), SimulatedRuntime(clock=clock)
    given = RuntimeAgent.resize

    async def hang(_self, _sandbox, _template):
        await asyncio.Event().wait()

    monkeypatch.setattr(RuntimeAgent, "resize", hang)
    async with paddock(pool_size=1, store=store, runtime=runtime, clock=clock) as world:
        await world.stocked(1)
        stock = await begin(world, inplace_update=SMALL)
        await world.until(lambda: bool(owned(world)))
    monkeypatch.setattr(RuntimeAgent, "resize", given)
    async with paddock(pool_size=1, store=store, runtime=runtime, clock=clock) as world:
        done = await completed(world)
        assert done.status.claimed_replicas == 1
        assert [item.metadata.uid in stock for item in owned(world)] == [True]
        assert [size.cpu for size in sizes] == ["500m"]


async def test_a_sandbox_that_is_not_ready_in_time_is_replaced() -> None:
    async with paddock(pool_size=0) as world:
        world.runtime.set_latency(Operation.CREATE, 25)
        await begin(world, wait_ready_timeout_seconds=10, claim_timeout_seconds=100)
        await asyncio.sleep(11)
        assert "not ready in time: its phase is Pending" in await said(world, "SandboxGivenUp")
        assert found(world).status.failures == 1
        world.runtime.set_latency(Operation.CREATE, 1)
        done = await completed(world)
        assert done.status.claimed_replicas == 1
        await world.until(lambda: len(world.provider.sandboxes_of_claim(KEY)) == 1)


async def test_at_the_claims_timeout_unready_sandboxes_are_deleted_and_ready_ones_stay() -> None:
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        world.runtime.set_latency(Operation.CREATE, 30)
        await begin(world, replicas=4, claim_timeout_seconds=10)
        done = await completed(world)
        assert done.status.claimed_replicas == len(done.status.sandboxes) == 2
        assert reason(done, "TimedOut") == "True ClaimTimeoutReached"
        assert "2 of 4 claimed in time; " in done.status.message
        await world.until(lambda: len(world.provider.sandboxes_of_claim(KEY)) == 2, seconds=60)
        assert all(item.status.phase is Phase.RUNNING for item in owned(world))
        assert world.plane.ledger.used("team:default", Dimension.COUNT, QuotaScope.ALL) == 2


async def test_failed_sandboxes_are_kept_for_inspection_if_requested() -> None:
    async with paddock(pool_size=0) as world:
        world.runtime.fail_next(Operation.CREATE, InvalidError("it has no such image"))
        await begin(world, replicas=1, reserve_failed_sandbox=True)
        done = await completed(world)
        assert done.status.claimed_replicas == len(done.status.sandboxes) == 1
        kept = [item for item in owned(world) if LABEL_GIVEN_UP in item.metadata.labels]
        assert [(item.status.phase, item.status.message) for item in kept] == [
            (Phase.FAILED, "it has no such image")
        ]
        assert kept[0].metadata.name != done.status.sandboxes[0].name


async def test_an_in_place_update_that_the_runtime_did_not_apply_is_detected() -> None:
    none = structs.replace(ALL_CAPABILITIES, can_update_image=False)
    clock = LoopClock()
    runtime = SimulatedRuntime(clock=clock, capabilities=none)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuntimeAgent, "can_update_image", lambda _self: True)
        async with paddock(
            pool_size=1, runtime=runtime, clock=clock, claim_images="team/*"
        ) as world:
            await world.stocked(1)
            await begin(world, inplace_update=IMAGE, claim_timeout_seconds=45)
            done = await completed(world)
            assert done.status.claimed_replicas == 0, "nobody is given another image than asked for"
            assert "image team/other is being started" in done.status.message


# ---- everything at once ------------------------------------------------------------------


@pytest.mark.usefixtures("_images", "sizes")
@pytest.mark.parametrize("seed", range(6))
async def test_under_random_faults_a_claim_gets_exactly_what_it_requested(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, given = random.Random(seed), RuntimeAgent.resize

    async def unreliable(self, sandbox, template):
        roll = dice.random()
        if roll < 0.2:
            raise UnavailableError("no answer")
        if roll < 0.3:
            raise UnsupportedError("its node is full")
        await given(self, sandbox, template)

    monkeypatch.setattr(RuntimeAgent, "resize", unreliable)
    store = UnreliableStore(seed)
    runtime = SimulatedRuntime(clock=(clock := LoopClock()))
    for operation in (Operation.UPDATE_IMAGE, Operation.CREATE):
        runtime.set_latency(operation, 2)
        for _ in range(3):
            error = InvalidError("it does not start") if dice.random() < 0.5 else None
            runtime.fail_next(operation, error)
    settings = {"store": store, "runtime": runtime, "clock": clock, "claim_images": "team/*"}
    both = InplaceUpdate(image="team/other", resources=UpdatedResources(cpu="500m"))
    async with paddock(pool_size=4, **settings) as world:
        await world.stocked(4)
        store.is_unreliable = True
        await begin(world, replicas=6, inplace_update=both, claim_timeout_seconds=3600)
        await asyncio.sleep(dice.uniform(0.1, 20))
    # The control plane was stopped in the middle, and another continues.
    async with paddock(pool_size=4, **settings) as world:
        await world.until(lambda: found(world).status.phase.is_final, seconds=3600)
        store.is_unreliable = False
        done = found(world)
        named = {item.name for item in done.status.sandboxes}
        assert done.status.claimed_replicas == len(named) == 6
        await world.until(
            lambda: {item.metadata.name for item in world.provider.sandboxes_of_claim(KEY)} == named
        )
        for sandbox in owned(world):
            assert sandbox.status.image == "team/other"
            assert sandbox.spec.resources == sandbox.status.resources
            assert sandbox.status.resources.cpu == "500m"
        await world.until(
            lambda: world.plane.ledger.used("team:default", Dimension.COUNT, QuotaScope.ALL) == 6
        )
