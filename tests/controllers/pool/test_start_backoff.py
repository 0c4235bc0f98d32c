"""Which sandboxes count as a failed start of a pool, and how long it backs off."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from paddock.controllers.pool.start_backoff import count_starts
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolStatus
from paddock.resources.kinds.sandbox import (
    ANNOTATION_AFTER_FAILURES,
    LABEL_REVISION,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.simulated import Operation
from tests.scenario.paddock import World, paddock

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FRESH = SandboxPoolStatus(revision="a")


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def sandbox(*, after: int = 0, started: float | None = None, revision: str = "a") -> Sandbox:
    """A sandbox that was created after this many failures."""
    return Sandbox(
        metadata=ObjectMeta(
            name="s",
            labels={LABEL_REVISION: revision},
            annotations={ANNOTATION_AFTER_FAILURES: str(after)} if after else {},
        ),
        spec=SandboxSpec(),
        status=SandboxStatus(
            phase=Phase.FAILED, started_at=None if started is None else later(started)
        ),
    )


def after(status: SandboxPoolStatus, *failed: Sandbox, at: float) -> SandboxPoolStatus:
    return count_starts(status, failed, (), revision="a", now=later(at))


def test_sandboxes_created_together_count_as_one_failure() -> None:
    many = [sandbox() for _ in range(2000)]
    status = after(FRESH, *many[:1000], at=1)
    assert (status.failures, status.backoff_until) == (1, later(2))
    assert after(status, *many[1000:], at=1.5) == status


def test_each_failed_start_doubles_the_wait_up_to_a_limit() -> None:
    status, waits, now = FRESH, [], 0.0
    for number in range(12):
        status = after(status, sandbox(after=number), at=now + 0.5)
        assert status.backoff_until is not None
        waits.append((status.backoff_until - later(now + 0.5)).total_seconds())
        now += 0.5 + waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_a_sandbox_lost_after_a_while_is_no_failed_start() -> None:
    assert after(FRESH, sandbox(started=1), at=61) == FRESH
    assert after(FRESH, sandbox(started=1), at=60).failures == 1


def test_a_start_after_a_failure_resets_the_count_and_an_older_one_does_not() -> None:
    status = after(FRESH, sandbox(), at=5)
    older, newer, slower = sandbox(started=4), sandbox(after=1, started=7), sandbox(started=6)
    assert count_starts(status, (), [older], revision="a", now=later(8)) == status
    assert count_starts(status, (), [older, newer], revision="a", now=later(8)) == FRESH
    assert count_starts(status, (), [older, slower], revision="a", now=later(8)) == FRESH


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_clock_skew_does_not_change_the_count_of_failures(ahead: float) -> None:
    born = later(ahead)
    tried = [
        structs.replace(item, metadata=structs.replace(item.metadata, creation_timestamp=born))
        for item in (sandbox(), sandbox(), sandbox(after=1))
    ]
    first = after(FRESH, tried[0], at=1)
    assert after(first, tried[1], at=1.5) == first
    assert after(first, tried[2], at=3).failures == 2


def test_a_changed_template_is_tried_at_once() -> None:
    status = after(FRESH, sandbox(), at=1)
    mended = count_starts(status, [sandbox()], (), revision="b", now=later(1.5))
    assert mended == structs.replace(FRESH, failures=0, backoff_until=None)


@pytest.mark.looptime
async def test_a_pool_that_loses_all_members_is_refilled_at_once() -> None:
    async with paddock(pool_size=16) as world:
        await world.stocked(16)
        lost = idle(world)
        for uid in lost:
            world.runtime.crash(uid, "its machine went down")
        await world.until(lambda: not idle(world) & lost)
        await world.stocked(16)
        await world.until(lambda: world.pool().status.failures == 0)


@pytest.mark.looptime
async def test_a_corrected_template_is_tried_at_once_after_any_number_of_failures() -> None:
    async with paddock(pool_size=0) as world:
        for _ in range(8):
            world.runtime.fail_next(Operation.CREATE, InvalidError("there is no such image"))
        await change(world, SandboxPool, replicas=1)
        await world.until(lambda: world.pool().status.failures == 8, seconds=200)
        await change(world, SandboxTemplate, env={"MENDED": "1"})
        await world.stocked(1)


def idle(world: World) -> set[str]:
    members = world.plane.pool_members.members(Key("default", "base"))
    return {item.metadata.uid for item in members.available.values()}


async def change(world: World, kind, **spec) -> None:
    await world.provider.write.mutate(
        kind,
        Key("default", "base"),
        lambda found: structs.replace(found, spec=structs.replace(found.spec, **spec)),
    )
