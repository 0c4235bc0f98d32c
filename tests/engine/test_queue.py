"""The work queue: one worker per key, no lost keys, earliest first, fair."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddock.engine.queue import QueueClosed, WorkQueue
from paddock.kit.backoff import Backoff

pytestmark = pytest.mark.looptime


@pytest.fixture
async def queue() -> WorkQueue[str]:
    return WorkQueue("test", backoff=Backoff(base_seconds=1, cap_seconds=10, jitter=0))


async def test_a_key_added_many_times_is_returned_once(queue: WorkQueue[str]) -> None:
    for _ in range(5):
        queue.add("a")
    assert await queue.get() == "a"
    assert len(queue) == 0


async def test_keys_are_returned_in_the_order_of_addition(queue: WorkQueue[str]) -> None:
    for key in "bca":
        queue.add(key)
    assert [await queue.get() for _ in range(3)] == ["b", "c", "a"]


async def test_a_key_added_while_in_process_is_due_after_done(
    queue: WorkQueue[str],
) -> None:
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert queue.is_idle


async def test_a_key_that_is_added_repeatedly_does_not_starve_others(
    queue: WorkQueue[str],
) -> None:
    queue.add("busy")
    queue.add("quiet")
    assert await queue.get() == "busy"
    queue.add("busy")
    queue.done("busy")
    assert await queue.get() == "quiet"


async def test_a_cancelled_delay_leaves_no_key(queue: WorkQueue[str]) -> None:
    for number in range(1000):
        queue.add_after(str(number), 3600)
        queue.cancel(str(number))
    assert len(queue._heap) < 100
    queue.add_after("a", 5)
    assert await queue.get() == "a"


async def test_a_delay_below_the_clock_resolution_passes() -> None:
    queue: WorkQueue[str] = WorkQueue("test")
    began = asyncio.get_running_loop().time()
    for _ in range(3):  # as if rounding left a rest of the deadline
        queue.add_after("a", 7e-15)
        queue.done(await queue.get())
    assert asyncio.get_running_loop().time() > began


async def test_a_delayed_key_is_returned_when_it_is_due(
    queue: WorkQueue[str], looptime: Any
) -> None:
    queue.add_after("a", 5)
    assert await queue.get() == "a"
    assert looptime == 5


async def test_the_earlier_of_two_delays_counts(queue: WorkQueue[str], looptime: Any) -> None:
    queue.add_after("a", 50)
    queue.add_after("a", 5)
    queue.add_after("a", 500)
    assert await queue.get() == "a"
    assert looptime == 5
    queue.done("a")
    await asyncio.sleep(1000)
    assert queue.is_idle, "the later ones are forgotten"


async def test_a_key_due_now_keeps_its_later_deadline(queue: WorkQueue[str], looptime: Any) -> None:
    queue.add_after("a", 5)
    queue.add("a")
    assert await queue.get() == "a"
    assert looptime == 0
    queue.done("a")
    assert await queue.get() == "a"
    assert looptime == 5


async def test_the_backoff_grows_up_to_a_limit_until_reset(
    queue: WorkQueue[str],
) -> None:
    assert [queue.retry("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert queue.failures("a") == 6
    queue.forget("a")
    assert queue.retry("a") == 1


async def test_a_key_that_failed_ten_thousand_times_can_still_be_retried() -> None:
    assert Backoff(base_seconds=1, cap_seconds=60, jitter=0).delay(10_000) == 60


async def test_jitter_never_shortens_the_delay() -> None:
    delays = [Backoff(base_seconds=1, jitter=0.5).delay(1) for _ in range(200)]
    assert 1.0 <= min(delays) < max(delays) <= 1.5


async def test_a_cancelled_worker_loses_no_key(queue: WorkQueue[str]) -> None:
    first = asyncio.create_task(queue.get())
    second = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    first.cancel()
    assert await second == "a"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_close_wakes_all_workers_and_drops_all_keys(queue: WorkQueue[str]) -> None:
    waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.add_after("a", 10)
    queue.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, QueueClosed) for result in results)
    queue.add("b")
    queue.add_after("b", 1)
    with pytest.raises(QueueClosed):
        await queue.get()


async def test_finishing_a_key_that_is_not_in_process_is_an_error(
    queue: WorkQueue[str],
) -> None:
    with pytest.raises(RuntimeError, match="not in process"):
        queue.done("a")


async def test_moving_a_deadline_repeatedly_does_not_grow_the_queue(
    queue: WorkQueue[str],
) -> None:
    for number in range(10_000, 0, -1):
        queue.add_after("a", float(number))
    assert len(queue._heap) < 100
    assert queue.delayed == 1


async def test_delayed_keys_are_returned_in_order_of_their_deadlines(queue: WorkQueue[str]) -> None:
    loop = asyncio.get_running_loop()
    for number in range(1000):
        queue.add_after(str(number), (number * 7919) % 1000 + 1)
    for _ in range(1000):
        key = await queue.get()
        assert loop.time() == (int(key) * 7919) % 1000 + 1
        queue.done(key)


KEYS = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS, st.just(0.0)),
        st.tuples(st.just("after"), KEYS, st.floats(0.1, 5)),
        st.tuples(st.just("retry"), KEYS, st.just(0.0)),
        st.tuples(st.just("sleep"), st.just(""), st.floats(0, 3)),
        st.tuples(st.just("cancel"), st.just(""), st.just(0.0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, work_seconds=st.floats(0, 2), workers=st.integers(1, 3))
async def test_no_key_is_processed_twice_at_once_and_no_addition_is_lost(
    steps: list[tuple[str, str, float]], work_seconds: float, workers: int
) -> None:
    """Every addition is followed by processing that starts at or after its due time."""
    loop = asyncio.get_running_loop()
    queue: WorkQueue[str] = WorkQueue("property")
    busy: set[str] = set()
    looked: dict[str, float] = {}
    owed: dict[str, float] = {}

    async def work() -> None:
        while True:
            key = await queue.get()
            assert key not in busy, "never processed twice at once"
            busy.add(key)
            looked[key] = loop.time()
            try:
                await asyncio.sleep(work_seconds)
            except asyncio.CancelledError:
                queue.add(key)
                raise
            finally:
                busy.discard(key)
                queue.done(key)

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    acts = {"add": lambda key, _: queue.add(key), "after": queue.add_after}
    acts["retry"] = lambda key, _: queue.retry(key)
    for what, key, seconds in steps:
        if what == "sleep":
            await asyncio.sleep(seconds)
        elif what == "cancel":
            victim = tasks.pop()
            victim.cancel()
            await asyncio.gather(victim, return_exceptions=True)
            tasks.append(asyncio.create_task(work()))
        else:
            acts[what](key, seconds)
            owed[key] = loop.time()
    await asyncio.sleep(300)
    assert queue.is_idle
    assert not busy
    for key, since in owed.items():
        assert looked[key] >= since, f"{key} was added at {since} and last looked at {looked[key]}"
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results


# ---- groups -----------------------------------------------------------------------------------


def grouped(slots: int | None = None) -> WorkQueue[str]:
    """Return a queue in which the first letter of a key is its group."""
    return WorkQueue("test", group_of=lambda key: key[0], slots=slots)


async def test_groups_take_turns() -> None:
    queue = grouped()
    for key in ("a1", "a2", "a3", "b1", "b2"):
        queue.add(key)
    assert [await queue.get() for _ in range(5)] == ["a1", "b1", "a2", "b2", "a3"]


async def test_a_group_leaves_slots_for_others() -> None:
    queue = grouped(slots=8)
    for number in range(20):
        queue.add(f"a{number}")
    got = [await asyncio.wait_for(queue.get(), 1) for _ in range(4)]
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(1)
    assert not waiting.done()
    queue.add("b1")
    assert await waiting == "b1"
    # A key that is done lets the next one of its group in.
    queue.done(got[0])
    assert await asyncio.wait_for(queue.get(), 1) == "a4"


async def test_a_key_without_its_slot_lets_the_next_one_in() -> None:
    queue = grouped(slots=2)
    for key in ("a1", "a2", "a3"):
        queue.add(key)
    assert await queue.get() == "a1"
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(1)
    assert not waiting.done()
    queue.release_slot("a1")
    assert await waiting == "a2"
    queue.done("a1")
    assert queue._running == {"a": 1}
    queue.done("a2")
    assert await queue.get() == "a3"
    queue.done("a3")
    assert queue.is_idle


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.sampled_from([f"{g}{n}" for g in "abc" for n in range(6)]), max_size=60),
    slots=st.integers(1, 8),
    workers=st.integers(1, 8),
)
def test_every_key_is_processed_whatever_the_slots(
    keys: list[str], slots: int, workers: int
) -> None:
    async def run() -> None:
        queue, left = grouped(slots), set(keys)

        async def work() -> None:
            while True:
                key = await queue.get()
                assert len(queue._taken) <= slots
                await asyncio.sleep(0)
                left.discard(key)
                queue.done(key)

        tasks = [asyncio.create_task(work()) for _ in range(workers)]
        for key in keys:
            queue.add(key)
        async with asyncio.timeout(5):
            while left or not queue.is_idle:
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not queue._taken
        assert not queue._running

    asyncio.run(run())


async def test_a_loop_that_calls_too_early_is_asked_only_once_more(
    queue: WorkQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop rounds delays to milliseconds."""
    loop, timers = asyncio.get_running_loop(), 0
    call_at = loop.call_at

    def rounded(when: float, callback: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal timers
        if getattr(callback, "__self__", None) is queue:
            timers += 1
            when = math.floor(when * 1000) / 1000
        return call_at(when, callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_at", rounded)
    started = loop.time()
    queue.add_after("a", 5.0004)

    assert await queue.get() == "a"
    assert timers == 2
    assert 5.0004 <= loop.time() - started < 5.0025
