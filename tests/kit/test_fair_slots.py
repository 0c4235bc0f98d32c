"""`FairSlots`: bounds hold, nobody starves, cancelled work leaves."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.kit.fair.slots import FairSlots

pytestmark = pytest.mark.looptime


async def hold(
    slots: FairSlots, team: str, seconds: float, done: list[str], lane: str = ""
) -> None:
    async with slots.slot(team, lane):
        await asyncio.sleep(seconds)
    done.append(team)


async def test_another_teams_work_starts_at_once_while_one_team_hangs() -> None:
    slots, done = FairSlots(total=8, per_group=2), list[str]()
    slow = [asyncio.create_task(hold(slots, "slow", 28, done)) for _ in range(100)]
    await asyncio.sleep(1)
    assert (slots.running, slots.waiting) == (2, 98)
    before = asyncio.get_running_loop().time()
    await hold(slots, "other", 0.1, done)
    assert asyncio.get_running_loop().time() - before == pytest.approx(0.1)
    assert done == ["other"]
    await asyncio.gather(*slow)
    # Two at a time: one team alone uses all that it may.
    assert asyncio.get_running_loop().time() - before == pytest.approx(100 / 2 * 28 - 1)


async def test_several_hanging_teams_leave_slots_for_others() -> None:
    slots, done = FairSlots(total=8, per_group=2), list[str]()
    tasks = [asyncio.create_task(hold(slots, team, 28, done)) for team in "abc" for _ in range(10)]
    await asyncio.sleep(1)
    assert slots.running == 6
    for team in "xyz":
        await hold(slots, team, 0.1, done)
    assert done == ["x", "y", "z"]
    await asyncio.gather(*tasks)


async def test_a_waiting_team_waits_for_one_running_operation_at_most() -> None:
    slots, done = FairSlots(total=1, per_group=1), list[str]()
    tasks = [asyncio.create_task(hold(slots, "many", 3, done)) for _ in range(50)]
    await asyncio.sleep(1)
    await hold(slots, "other", 1, done)
    assert done == ["many", "other"]
    await asyncio.gather(*tasks)


async def test_kinds_of_one_team_take_turns() -> None:
    slots, done = FairSlots(total=2, per_group=1), list[str]()
    tasks = [asyncio.create_task(hold(slots, "team", 1, done, "fork")) for _ in range(100)]
    await asyncio.sleep(0.5)
    before = asyncio.get_running_loop().time()
    await hold(slots, "team", 0.1, done, "restore")
    # It waits for the running fork alone.
    assert asyncio.get_running_loop().time() - before < 0.7
    await asyncio.gather(*tasks)


async def test_cancelled_work_leaves_the_queue_and_its_slot() -> None:
    slots, done = FairSlots(total=1, per_group=1), list[str]()
    first, second, third = (asyncio.create_task(hold(slots, team, 10, done)) for team in "abc")
    await asyncio.sleep(1)
    second.cancel()
    await asyncio.sleep(0)
    assert slots.waiting == 1
    first.cancel()
    await asyncio.sleep(1)
    assert (slots.running, slots.waiting) == (1, 0)
    await third
    assert (done, slots.running) == (["c"], 0)


async def test_a_grant_that_meets_a_cancellation_is_passed_on() -> None:
    slots, done = FairSlots(total=1, per_group=1), list[str]()
    first, second, third = (asyncio.create_task(hold(slots, team, 10, done)) for team in "abc")
    await asyncio.sleep(1)
    first.cancel()
    await asyncio.sleep(0)  # the slot is granted to the second, which has not run yet
    second.cancel()
    await third
    assert (done, slots.running, slots.waiting) == (["c"], 0, 0)


async def test_work_cancelled_before_its_task_runs_again_gets_no_slot() -> None:
    slots, done = FairSlots(total=1, per_group=1), list[str]()
    first, second, third = (asyncio.create_task(hold(slots, team, 10, done)) for team in "abc")
    await asyncio.sleep(1)
    second.cancel()
    first.cancel()  # releases the slot while the second is cancelled but still queued
    await third
    assert (done, slots.running, slots.waiting) == (["c"], 0, 0)


Work = tuple[str, float, float, float | None]
"""Team, start, duration, and when it is cancelled."""
_work = st.tuples(
    st.sampled_from("abcde"),
    st.floats(0, 5),
    st.floats(0.1, 5),
    st.none() | st.floats(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(works=st.lists(_work, max_size=40), total=st.integers(1, 8), per_group=st.integers(1, 4))
def test_bounds_hold_and_all_work_is_done(works: list[Work], total: int, per_group: int) -> None:
    async def run() -> None:
        slots = FairSlots(total=total, per_group=per_group)
        running: Counter[str] = Counter()

        async def work(team: str, start: float, seconds: float) -> None:
            await asyncio.sleep(start / 1000)
            async with slots.slot(team):
                running[team] += 1
                assert running[team] <= per_group
                assert running.total() <= total
                try:
                    await asyncio.sleep(seconds / 1000)
                finally:
                    running[team] -= 1

        tasks: list[asyncio.Task[None]] = []
        for team, start, seconds, cancelled_at in works:
            tasks.append(asyncio.create_task(work(team, start, seconds)))
            if cancelled_at is not None:
                asyncio.get_running_loop().call_later(cancelled_at / 1000, tasks[-1].cancel)
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        for (*_, cancelled_at), end in zip(works, ends, strict=True):
            assert end is None or (cancelled_at is not None and isinstance(end, BaseException))
            assert not isinstance(end, AssertionError)
        assert (slots.running, slots.waiting) == (0, 0)

    asyncio.run(run())
