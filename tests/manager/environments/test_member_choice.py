"""The choice of the member that serves a claim: as a property, and in a control plane."""

import asyncio
import random
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import NotFoundError, RateLimitedError, UnavailableError
from paddock.manager.environments.member_choice import MemberCandidate, choose, choose_federated
from paddock.manager.environments.queue import ClaimQueue
from paddock.manager.environments.ticket import Ticket
from paddock.resources.kinds.batch import BatchSandbox, BatchSandboxSpec
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.env import (
    Autoscaling,
    EnvCluster,
    MemberState,
    SandboxEnv,
    ScalingGroup,
)
from paddock.resources.kinds.sandbox import LABEL_POOL, Sandbox
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.simulated import Operation, SimulatedRuntime
from tests.controllers.env.make import ENV, environment, found, idle, member, pool, seen
from tests.scenario.paddock import CALLER, World, paddock

WANTED = NewSandbox(template="agents")

candidates = st.builds(
    MemberCandidate,
    cluster=st.sampled_from(("", "east", "west")),
    name=st.text("abc", min_size=1, max_size=3),
    priority=st.integers(-5, 5),
    idle=st.integers(0, 100),
    pending=st.integers(0, 5),
    headroom=st.one_of(st.none(), st.integers(0, 50)),
    queue=st.integers(0, 50),
    is_saturated=st.booleans(),
    is_stale=st.booleans(),
)
many = st.lists(candidates, min_size=1, max_size=8)


@settings(max_examples=200)
@given(many)
def test_no_member_that_cannot_serve_is_chosen_while_another_can(found) -> None:
    best = choose(found)
    assert best is not None
    fresh = [item for item in found if not item.is_stale]
    if any(item.can_serve for item in fresh):
        assert best.can_serve
        assert not best.is_stale
        assert best.priority == min(item.priority for item in fresh if item.can_serve)
    elif any(item.can_grow for item in fresh):
        assert best.can_grow
        assert best.priority == min(item.priority for item in fresh if item.can_grow)
    elif fresh:
        assert not best.is_stale


@settings(max_examples=200)
@given(many)
def test_the_order_over_clusters_is_local_idle_remote_idle_local_growth_remote_growth(
    found,
) -> None:
    best = choose_federated(found)
    known = [item for item in found if item.is_local or not item.is_stale]
    here = [item for item in known if item.is_local]
    there = [item for item in known if not item.is_local]
    if any(item.can_serve for item in here):
        assert best is not None
        assert best.is_local
        assert best.can_serve
    elif any(item.can_serve for item in there):
        assert best is not None
        assert not best.is_local
        assert best.can_serve
    elif any(item.can_grow for item in here):
        assert best is not None
        assert best.is_local
    elif any(item.can_grow for item in there):
        assert best is not None
        assert not best.is_local
    else:
        assert best is None


def test_no_number_of_idle_sandboxes_outweighs_a_priority() -> None:
    near = MemberCandidate(name="near", priority=0, idle=1)
    far = MemberCandidate(name="far", priority=1, idle=1_000_000)
    assert choose([far, near]) is near


# ---- in a control plane ----------------------------------------------------------------------

pool_of = lambda sandbox: sandbox.metadata.labels[LABEL_POOL]  # noqa: E731


async def started(world: World, members, **env) -> None:
    await world.provider.write.create(environment(members, **env))
    await asyncio.sleep(1)


@pytest.mark.looptime
async def test_claims_fill_members_by_priority_and_spill_over() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"first": member(1, priority=1), "second": member(5, priority=2)})
        await idle(world, "agents-second", 5)
        got = [pool_of(await world.manager.claims.create(CALLER, WANTED)) for _ in range(3)]
        assert got == ["agents-first", "agents-second", "agents-second"]


@pytest.mark.looptime
async def test_a_queued_claim_makes_the_pool_grow_and_is_served() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member()}, group=ScalingGroup())
        begun = world.plane.clock.now()
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        assert pool_of(sandbox) == "agents-one"
        assert world.plane.clock.now() - begun < timedelta(seconds=2)
        await asyncio.sleep(3)
        made = pool(world, "agents-one")
        assert made is not None
        assert made.status.autoscaling is not None
        assert "claim" in made.status.autoscaling.message
        shown = seen(world, "one")
        assert shown is not None
        assert shown.autoscaling_enabled
        assert shown.running == 1
        segment = found(world).spec.clusters["local"]
        assert segment.members["one"].replicas == shown.desired


@pytest.mark.looptime
async def test_a_burst_of_claims_is_served_and_the_pool_shrinks_afterwards() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member()}, group=ScalingGroup(idle_timeout_seconds=60))
        made = await asyncio.gather(
            *(world.manager.claims.create(CALLER, WANTED) for _ in range(40))
        )
        assert len({item.metadata.uid for item in made}) == 40
        await asyncio.sleep(5)
        shown = seen(world, "one")
        assert shown is not None
        assert shown.desired <= 61
        for item in made:
            await world.provider.write.delete(item)
        await asyncio.sleep(2000)
        shown = seen(world, "one")
        assert shown is not None
        assert shown.desired == 0


@pytest.mark.looptime
async def test_when_all_members_are_saturated_the_reply_is_429_with_retry_after() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member(1, max_replicas=1)}, group=ScalingGroup())
        await idle(world, "agents-one", 1)
        await world.manager.claims.create(CALLER, WANTED)
        await asyncio.sleep(2)
        with pytest.raises(RateLimitedError) as refused:
            await world.manager.claims.create(CALLER, WANTED)
        assert refused.value.retry_after_seconds >= 1
        answer = await world.http.post("/sandboxes", json={"templateID": "agents"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.looptime
async def test_queued_claims_are_served_by_priority_then_by_time() -> None:
    slow = SimulatedRuntime(clock=LoopClock(), latencies={Operation.CREATE: 5.0})
    async with paddock(pool_size=0, runtime=slow) as world:
        await started(world, {"one": member()}, group=ScalingGroup())
        queue = world.plane.environments.claim_queue
        order: list[str] = []

        async def wait(name: str, priority: int) -> None:
            ticket = Ticket(queue, ENV, priority=priority)
            ticket.stays_here = True
            await ticket._wait()
            order.append(name)
            ticket.release_grant()

        tasks = []
        for name, priority in (("slow", 0), ("second", 0), ("urgent", 9)):
            tasks.append(asyncio.create_task(wait(name, priority)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        assert order == ["urgent", "slow", "second"]


@pytest.mark.looptime
async def test_a_new_claim_does_not_overtake_queued_ones() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member(max_replicas=3)}, group=ScalingGroup())
        made = await asyncio.gather(
            *(world.manager.claims.create(CALLER, WANTED) for _ in range(3))
        )
        times = [item.spec.claim.claim_time for item in made if item.spec.claim]
        assert times == sorted(times)


@pytest.mark.looptime
async def test_a_new_claim_does_not_overtake_queued_ones_to_another_cluster() -> None:
    class Neighbour:
        idle = 0

        def candidates(self, env: Key) -> tuple[MemberCandidate, ...]:
            return (MemberCandidate(cluster="east", name="far", idle=self.idle),)

    async with paddock(pool_size=0) as world:
        await started(world, {"one": member(0, max_replicas=9)}, group=ScalingGroup())
        neighbour = Neighbour()
        queue = ClaimQueue(
            world.plane.environments.env_snapshots,
            world.plane.pool_members,
            world.plane.clock,
            elsewhere=neighbour,
        )
        came: list[str] = []

        async def claim(name: str) -> None:
            found = await Ticket(queue, ENV).pool()
            assert isinstance(found, MemberCandidate)
            neighbour.idle -= 1
            came.append(name)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for name in ("first", "second"):
                tasks.create_task(claim(name))
                await asyncio.sleep(0.3)
            neighbour.idle = 2
            tasks.create_task(claim("newcomer"))
            await asyncio.sleep(5)
            assert came == ["first", "second"]
            neighbour.idle = 1
        assert came == ["first", "second", "newcomer"]


@pytest.mark.looptime
async def test_a_claim_for_one_scaling_group_is_served_by_it_or_refused() -> None:
    async with paddock(pool_size=0) as world:
        env = environment(
            {"a": member(2, scaling_group="gpu"), "b": member(2)}, group=ScalingGroup()
        )
        groups = Autoscaling(groups={"gpu": ScalingGroup(), "default": ScalingGroup()})
        env = structs.replace(env, spec=structs.replace(env.spec, autoscaling=groups))
        await world.provider.write.create(env)
        await idle(world, "agents-a", 2)
        pinned = structs.replace(WANTED, metadata={"paddock.dev/scaling-group": "gpu"})
        for _ in range(3):
            assert pool_of(await world.manager.claims.create(CALLER, pinned)) == "agents-a"
        lost = structs.replace(WANTED, metadata={"paddock.dev/scaling-group": "none"})
        with pytest.raises(UnavailableError, match="none"):
            await world.manager.claims.create(CALLER, lost)


@pytest.mark.looptime
async def test_a_deleted_environment_is_not_found() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member(1)})
        await idle(world, "agents-one", 1)
        await world.provider.write.delete(found(world))
        await asyncio.sleep(1)
        assert world.provider.get(SandboxEnv, ENV) is None
        with pytest.raises(NotFoundError):
            await world.manager.claims.create(CALLER, WANTED)


@pytest.mark.looptime
async def test_a_sandbox_claim_on_an_environment_is_queued_and_served() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"a": member(2), "b": member(max_replicas=4)}, group=ScalingGroup())
        wanted = SandboxClaim(
            metadata=ObjectMeta(name="five", namespace="default"),
            spec=SandboxClaimSpec(template_name="agents", replicas=5),
        )
        await world.provider.write.create(wanted)

        def completed() -> bool:
            claim = world.provider.get(SandboxClaim, wanted.key)
            return claim is not None and claim.status.phase.is_final

        await world.until(completed)
        claim = world.provider.get(SandboxClaim, wanted.key)
        assert claim is not None
        assert claim.status.claimed_replicas == 5
        owned = world.provider.sandboxes_of_claim(wanted.key)
        assert {pool_of(item) for item in owned} <= {"agents-a", "agents-b"}
        queue = world.plane.environments.claim_queue
        assert queue.waiting(ENV).total == 0
        assert not queue._granted_counts
        assert not queue._granted


@pytest.mark.looptime
async def test_queued_claims_survive_a_restart_of_the_control_plane() -> None:
    async with paddock(pool_size=0) as world:
        store = world.store
        await started(world, {"one": member(0)})
        await world.provider.write.create(
            SandboxClaim(
                metadata=ObjectMeta(name="patient", namespace="default"),
                spec=SandboxClaimSpec(
                    template_name="agents", replicas=2, claim_timeout_seconds=300
                ),
            )
        )
        await asyncio.sleep(5)
        assert world.plane.environments.claim_queue.waiting(ENV).total == 2
    async with paddock(pool_size=0, store=store) as world:
        await asyncio.sleep(5)
        assert world.plane.environments.claim_queue.waiting(ENV).total == 2

        def grow(env: SandboxEnv) -> SandboxEnv:
            clusters = {"local": EnvCluster(members={"one": member(2)})}
            return structs.replace(env, spec=structs.replace(env.spec, clusters=clusters))

        await world.provider.write.mutate(SandboxEnv, ENV, grow)
        key = Key("default", "patient")
        await world.until(lambda: len(world.provider.sandboxes_of_claim(key)) == 2)


@pytest.mark.looptime
async def test_a_batch_on_an_environment_makes_its_member_grow() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member(1)}, group=ScalingGroup())
        await idle(world, "agents-one", 1)
        batch = BatchSandbox(
            metadata=ObjectMeta(name="work", namespace="default"),
            spec=BatchSandboxSpec(pool_ref="agents", replicas=4),
        )
        await world.provider.write.create(batch)

        def served() -> int:
            known = world.provider.get(BatchSandbox, batch.key)
            return known.status.allocated if known is not None else 0

        await world.until(lambda: served() == 4)
        await asyncio.sleep(5)
        made = pool(world, "agents-one")
        assert made is not None
        assert made.status.allocated == 4
        assert made.spec.capacity is not None
        assert made.spec.capacity.pool_max <= 7
        assert made.status.autoscaling is not None
        assert made.status.autoscaling.last_scale_up_time is not None


@pytest.mark.looptime
async def test_idle_members_are_active() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member(1)})
        await idle(world, "agents-one", 1)
        await asyncio.sleep(15)
        shown = seen(world, "one")
        assert shown is not None
        assert shown.state is MemberState.ACTIVE


@pytest.mark.looptime
async def test_cancelled_claims_leave_nothing_in_the_queue() -> None:
    draw = random.Random(7)
    slow = SimulatedRuntime(clock=LoopClock(), latencies={Operation.CREATE: 0.5}, jitter=0.9)
    async with paddock(pool_size=0, runtime=slow) as world:
        await started(world, {"a": member(max_replicas=9), "b": member()}, group=ScalingGroup())

        async def claim() -> Sandbox | None:
            await asyncio.sleep(draw.uniform(0, 5))
            try:
                async with asyncio.timeout(draw.choice((0.05, 0.3, 30))):
                    return await world.manager.claims.create(CALLER, WANTED)
            except TimeoutError:
                return None

        made = await asyncio.gather(*(claim() for _ in range(150)))
        got = [item.metadata.uid for item in made if item is not None]
        assert len(set(got)) == len(got) > 40
        await asyncio.sleep(40)
        queue = world.plane.environments.claim_queue
        assert queue.waiting(ENV).total == 0
        assert not queue._granted_counts
        assert not queue._queues
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        assert sandbox.metadata.uid not in got


@pytest.mark.looptime
async def test_the_autoscaler_keeps_its_state_over_a_restart() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member()}, group=ScalingGroup(idle_timeout_seconds=30))
        await world.manager.claims.create(CALLER, WANTED)
        await asyncio.sleep(12)
        before = pool(world, "agents-one")
        assert before is not None
        store, runtime, clock = world.store, world.runtime, world.plane.clock
        state = before.status.autoscaling
        assert state is not None
        assert state.last_scale_up_time is not None
        assert state.last_claim_time is not None
        assert state.claim_rate > 0
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        await asyncio.sleep(25)
        after = pool(world, "agents-one")
        assert after is not None
        assert after.status.autoscaling is not None
        assert after.status.autoscaling.last_scale_up_time == state.last_scale_up_time
        assert after.status.autoscaling.claim_rate > 0
        # The second one does not scale down within the stabilization time of the first.
        assert after.spec.capacity == before.spec.capacity


@pytest.mark.looptime
async def test_every_scaling_decision_is_recorded_with_its_reason() -> None:
    async with paddock(pool_size=0) as world:
        group = ScalingGroup(
            idle_timeout_seconds=20, stabilization_seconds=20, idle_zero_quiet_window_seconds=20
        )
        await started(world, {"one": member()}, group=group)
        sandbox = await world.manager.claims.create(CALLER, WANTED)
        await world.provider.write.delete(sandbox)
        await asyncio.sleep(300)
        events = (await world.store.list(Event)).items
        told = {event.reason: event.message for event in events}
        assert "1 claim cannot be served" in told["ScaleUp"]
        assert "idle for long" in told["ScaleDownStarted"]
        assert "had been idle for long" in told["ScaleDownCompleted"]
        made = pool(world, "agents-one")
        assert made is not None
        assert made.status.autoscaling is not None
        assert made.status.autoscaling.message.startswith("shrinks from")


@pytest.mark.looptime
async def test_a_retry_with_the_same_idempotency_key_gets_the_same_sandbox() -> None:
    async with paddock(pool_size=0) as world:
        await started(world, {"one": member()}, group=ScalingGroup())
        keyed = structs.replace(WANTED, idempotency_key="once")
        first, second = await asyncio.gather(
            *(world.manager.claims.create(CALLER, keyed) for _ in "ab")
        )
        third = await world.manager.claims.create(CALLER, keyed)
        assert first.metadata.uid == second.metadata.uid == third.metadata.uid
