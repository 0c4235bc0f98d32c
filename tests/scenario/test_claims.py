"""SandboxClaims: several sandboxes at once, declaratively."""

import asyncio

import pytest

from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import QuotaExceededError, UnavailableError
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.meta import Key, ObjectMeta, is_true
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

TTL_SECONDS = 30
CLAIM_SECONDS = 20


async def claim(world: World, **spec) -> SandboxClaim:
    # Real pods on a busy machine take a while.
    patient = {"claim_timeout_seconds": 150, "wait_ready_timeout_seconds": 100, **spec}
    wanted = SandboxClaim(
        metadata=ObjectMeta(name="three", namespace="default"),
        spec=SandboxClaimSpec(template_name="base", **patient),
    )
    await world.provider.write.create(wanted)

    def completed() -> bool:
        found = world.provider.get(SandboxClaim, Key("default", "three"))
        return found is not None and found.status.phase.is_final

    await world.until(completed, seconds=200)
    found = world.provider.get(SandboxClaim, Key("default", "three"))
    assert found is not None
    return found


async def test_a_claim_uses_the_stock_and_creates_the_rest() -> None:
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        done = await claim(world, replicas=12, env_vars={"A": "1"})
        assert done.status.claimed_replicas == 12
        assert done.status.phase == "Completed"
        assert is_true(done.status.conditions, "Completed")
        assert len({item.sandbox_id for item in done.status.sandboxes}) == 12
        owned = world.provider.sandboxes_of_claim(done.key)
        assert len(owned) == 12
        assert all(item.spec.claim.env_vars == {"A": "1"} for item in owned if item.spec.claim)


async def test_a_claim_that_may_not_create_keeps_what_it_got_at_its_timeout() -> None:
    async with paddock(pool_size=0) as world:
        done = await claim(world, replicas=3, create_on_no_stock=False, claim_timeout_seconds=10)
        assert done.status.claimed_replicas == 0
        assert done.status.phase == "Failed"
        assert is_true(done.status.conditions, "TimedOut")
        assert is_true(done.status.conditions, "Failed")
        assert not is_true(done.status.conditions, "Completed")


async def test_a_completed_claim_is_final_and_deleted_after_its_ttl_without_its_sandboxes() -> None:
    async with paddock(pool_size=2) as world:
        done = await claim(world, replicas=2, ttl_seconds_after_completed=TTL_SECONDS)
        first = world.provider.sandboxes_of_claim(done.key)[0]
        await world.provider.write.delete(first)
        await asyncio.sleep(TTL_SECONDS * 2 / 3)
        await world.until(
            lambda: len(world.provider.sandboxes_of_claim(done.key)) == 1, seconds=0.1
        )
        await world.until(lambda: world.provider.get(SandboxClaim, done.key) is None)
        assert len(world.provider.sandboxes_of_claim(done.key)) == 1


async def test_a_claim_on_a_missing_target_reports_it() -> None:
    async with paddock() as world:
        wanted = SandboxClaim(
            metadata=ObjectMeta(name="lost", namespace="default"),
            spec=SandboxClaimSpec(template_name="nowhere"),
        )
        created = await world.provider.write.create(wanted)

        def completed() -> bool:
            found = world.provider.get(SandboxClaim, created.key)
            return found is not None and found.status.phase.is_final

        await world.until(completed)
        found = world.provider.get(SandboxClaim, created.key)
        assert found is not None
        assert found.status.phase == "Failed"
        assert "nowhere" in found.status.message


async def allow(world: World, count: int) -> None:
    limit = QuotaLimit(Dimension.COUNT, QuotaScope.ALL, count)
    await world.plane.keyring.set_team_quota("default", Quota((limit,)))


async def test_a_claim_is_limited_by_its_teams_quota_and_reports_it() -> None:
    async with paddock(pool_size=3) as world:
        await world.stocked(3)
        await allow(world, 3)
        done = await claim(world, replicas=5, claim_timeout_seconds=CLAIM_SECONDS)
        assert done.status.claimed_replicas == 3
        assert is_true(done.status.conditions, "TimedOut")
        assert "has 3 of 3 sandbox.count" in done.status.message
        with pytest.raises(QuotaExceededError):
            await world.manager.claims.create(CALLER, NewSandbox(template="base"))


async def test_a_claim_continues_when_the_quota_has_room_again() -> None:
    async with paddock(pool_size=2) as world:
        await allow(world, 1)
        first = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        waiting = asyncio.ensure_future(claim(world, replicas=1, claim_timeout_seconds=60))
        await asyncio.sleep(10)
        assert not waiting.done()
        assert first.spec.claim is not None
        await world.manager.lifecycle.kill(CALLER, first.spec.claim.sandbox_id)
        assert (await waiting).status.claimed_replicas == 1


async def test_claims_share_the_creation_rate_with_others() -> None:
    async with paddock(pool_size=0, cold_creates_per_second=1) as world:
        greedy = asyncio.ensure_future(claim(world, replicas=10, claim_timeout_seconds=60))
        await asyncio.sleep(3)
        started = asyncio.get_running_loop().time()
        await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        assert asyncio.get_running_loop().time() - started < 15
        assert (await greedy).status.claimed_replicas == 10
        assert asyncio.get_running_loop().time() >= 9


async def test_a_lost_reply_neither_leaks_quota_nor_grants_one_too_many() -> None:
    async with paddock(pool_size=0) as world:
        await allow(world, 2)
        real = world.store.create
        lost = iter((True, False, True, False, False, False))

        async def lossy(obj, **options):
            if obj.KIND != "Sandbox":
                return await real(obj, **options)
            # One is written and its reply is lost; the next is lost on its way.
            if next(lost):
                await real(obj, **options)
            raise UnavailableError("no answer")

        world.store.create = lossy
        working = asyncio.ensure_future(claim(world, replicas=2, claim_timeout_seconds=60))
        await asyncio.sleep(1)
        world.store.create = real
        done = await working
        assert done.status.claimed_replicas == 2
        assert len(world.provider.sandboxes_of_claim(done.key)) == 2
        assert world.plane.ledger.used("team:default", Dimension.COUNT, QuotaScope.ALL) == 2


async def test_a_deleted_claim_leaves_no_quota_reserved_after_a_lost_reply() -> None:
    async with paddock(pool_size=0) as world:
        await allow(world, 2)
        real = world.store.create

        async def lossy(obj, **options):
            if obj.KIND == "Sandbox":
                raise UnavailableError("no answer")
            return await real(obj, **options)

        world.store.create = lossy
        working = asyncio.ensure_future(claim(world, replicas=1, claim_timeout_seconds=60))
        await asyncio.sleep(1)
        assert world.plane.ledger.used("team:default", Dimension.COUNT, QuotaScope.ALL) == 1
        working.cancel()
        waiting = world.provider.get(SandboxClaim, Key("default", "three"))
        assert waiting is not None
        await world.provider.write.delete(waiting)
        await asyncio.sleep(1)
        assert world.plane.ledger.used("team:default", Dimension.COUNT, QuotaScope.ALL) == 0


async def test_a_claim_ignores_sandboxes_of_an_earlier_claim_with_its_name() -> None:
    async with paddock(pool_size=2) as world:
        first = await claim(world, replicas=2)
        await world.provider.write.delete(first)
        await world.until(lambda: world.provider.get(SandboxClaim, first.key) is None)
        second = await claim(world, replicas=1)
        before = {item.sandbox_id for item in first.status.sandboxes}
        assert second.status.claimed_replicas == 1
        assert not before & {item.sandbox_id for item in second.status.sandboxes}
        assert len(world.provider.sandboxes_of_claim(second.key)) == 3
