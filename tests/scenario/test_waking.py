"""Deadlines when traffic wakes a sandbox, through the manager."""

import asyncio
from datetime import timedelta

import pytest
from msgspec import structs

from paddock.api.internal import GatewayReport
from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import ConflictError, NotFoundError, QuotaExceededError
from paddock.resources.kinds.sandbox import IdlePause, Phase, Sandbox
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime


async def paused(world, **wanted) -> Sandbox:
    sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="base", **wanted))
    assert sandbox.spec.claim is not None
    return await world.manager.lifecycle.pause(CALLER, sandbox.spec.claim.sandbox_id)


@pytest.mark.parametrize(("timeout", "expected"), [(60, 300), (1000, 1000)])
async def test_a_sandbox_with_auto_pause_gets_a_new_deadline(timeout: int, expected: int) -> None:
    async with paddock() as world:
        asleep = await paused(world, timeout_seconds=timeout, auto_pause=True, auto_resume=True)
        before = world.plane.clock.now()
        woken = await world.manager.lifecycle.wake(asleep)
        after = world.plane.clock.now()
        assert woken.status.phase is Phase.RUNNING
        assert woken.spec.pause_time is not None
        fresh, second = timedelta(seconds=expected), timedelta(seconds=1)
        assert before + fresh - second <= woken.spec.pause_time <= after + fresh + second


async def test_a_sandbox_without_a_deadline_stays_without_one() -> None:
    async with paddock() as world:
        asleep = await paused(world, timeout_seconds=None)
        woken = await world.manager.lifecycle.wake(asleep)
        assert (woken.spec.pause_time, woken.spec.shutdown_time) == (None, None)


async def test_a_shutdown_time_is_not_extended() -> None:
    async with paddock() as world:
        asleep = await paused(world, timeout_seconds=60)
        at = world.plane.clock.now() + timedelta(seconds=77)
        asleep = await world.provider.write.mutate(
            Sandbox,
            asleep.key,
            lambda it: structs.replace(it, spec=structs.replace(it.spec, shutdown_time=at)),
        )
        woken = await world.manager.lifecycle.wake(asleep)
        assert (woken.spec.pause_time, woken.spec.shutdown_time) == (None, at)


async def test_an_expired_sandbox_is_not_woken() -> None:
    async with paddock() as world:
        asleep = await paused(world, timeout_seconds=60)
        await world.manager.lifecycle.kill(CALLER, asleep.spec.claim.sandbox_id)
        with pytest.raises((NotFoundError, ConflictError)):
            await world.manager.lifecycle.wake(asleep)


@pytest.mark.parametrize(("timeout", "expected"), [(60, 300), (1000, 1000)])
async def test_a_woken_sandbox_that_shuts_down_has_a_deadline(timeout: int, expected: int) -> None:
    async with paddock() as world:
        asleep = await paused(world, timeout_seconds=timeout, auto_resume=True)
        assert asleep.spec.shutdown_time == asleep.spec.retained_until
        before = world.plane.clock.now()
        woken = await world.manager.lifecycle.wake(asleep)
        after = world.plane.clock.now()
        fresh, second = timedelta(seconds=expected), timedelta(seconds=1)
        assert woken.spec.pause_time is None
        assert woken.spec.shutdown_time is not None
        assert before + fresh - second <= woken.spec.shutdown_time <= after + fresh + second


@pytest.mark.parametrize(("timeout", "auto_pause"), [(None, False), (60, True), (60, False)])
async def test_a_retention_ends_with_its_pause(timeout, auto_pause) -> None:
    async with paddock() as world:
        wanted = NewSandbox(template="base", timeout_seconds=timeout, auto_pause=auto_pause)
        sandbox = await world.manager.claims.create(CALLER, wanted)
        assert sandbox.spec.claim is not None
        asleep = await world.manager.lifecycle.pause(
            CALLER, sandbox.spec.claim.sandbox_id, retention_seconds=500
        )
        assert asleep.spec.shutdown_time is not None
        woken = await world.manager.lifecycle.wake(asleep)
        assert woken.spec.shutdown_time != asleep.spec.shutdown_time


async def test_a_used_up_quota_keeps_the_sandbox_paused() -> None:
    async with paddock() as world:
        asleep = await paused(world, timeout_seconds=60)
        assert asleep.spec.claim is not None
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.RUNNING, 0)
        await world.plane.keyring.set_team_quota("default", Quota((limit,)))
        with pytest.raises(QuotaExceededError):
            await world.manager.lifecycle.wake(asleep)
        assert world.provider.sandbox(asleep.key).spec.paused


async def test_a_sandbox_with_idle_pause_is_paused_when_idle_and_not_before() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(
            CALLER,
            NewSandbox(
                template="base", timeout_seconds=3600, idle_pause=IdlePause(after_seconds=60)
            ),
        )
        uid = sandbox.metadata.uid

        def is_paused() -> bool:
            return world.provider.sandbox(sandbox.key).spec.paused

        for _ in range(4):
            await asyncio.sleep(30)
            await world.plane.on_report(GatewayReport("http://gateway", {uid: 0.0}))
            assert not is_paused()
        await world.until(is_paused, seconds=120)
        await world.until(lambda: world.provider.sandbox(sandbox.key).status.phase is Phase.PAUSED)
        await world.manager.lifecycle.wake(world.provider.sandbox(sandbox.key))
        await asyncio.sleep(30)
        assert not is_paused()
        await world.until(is_paused, seconds=120)
        await world.manager.lifecycle.kill(CALLER, sandbox.spec.claim.sandbox_id)
        await world.until(lambda: world.plane.activity.last(uid) is None)
