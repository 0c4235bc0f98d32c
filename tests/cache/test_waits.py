"""Wait tasks: shared, locked against opposite actions, no missed wake-ups, no leaks."""

import asyncio
import gc
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from paddock.cache.action_locks import LEASE_SECONDS, WaitAction
from paddock.cache.checks import REASON_PAUSE_FAILED
from paddock.cache.provider import Provider
from paddock.cache.waits import WaitTask
from paddock.engine.informer import Filter
from paddock.kit.clock import LoopClock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.resources.kinds.checkpoint import (
    Checkpoint,
    CheckpointPhase,
    CheckpointSpec,
    CheckpointStatus,
)
from paddock.resources.kinds.sandbox import CONDITION_PAUSED, Phase, Sandbox
from paddock.resources.meta import (
    Condition,
    ConditionStatus,
    Key,
    ObjectMeta,
    set_condition,
    with_meta,
)
from paddock.store.memory import MemoryStore
from tests.cache.make import EPOCH, identity, in_phase, sandbox, with_spec
from tests.engine.faults import FaultyStore

pytestmark = pytest.mark.looptime


async def make(store: FaultyStore, box: Sandbox) -> Sandbox:
    """Store a sandbox together with its status."""
    created = await store.create(box)
    return await store.update_status(structs.replace(created, status=box.status))


@pytest.fixture
async def running(cache: Provider, store: FaultyStore) -> Sandbox:
    box = await make(store, sandbox(claim=identity()))
    await asyncio.sleep(0.01)
    return box


async def record(store: FaultyStore, key: Key, phase: Phase, *, after: float = 0.0) -> Sandbox:
    """Record a phase after a delay, as the controller does."""
    await asyncio.sleep(after)
    return await store.update_status(in_phase(await store.get(Sandbox, key), phase))


async def ask(cache: Provider, box: Sandbox, **spec: Any) -> Sandbox:
    return await cache.write.mutate(Sandbox, box.key, lambda obj: with_spec(obj, **spec))


async def begin_pause(cache: Provider, box: Sandbox) -> tuple[WaitTask[Sandbox], Sandbox]:
    """Acquire the lock, then write, as every pause does."""
    return cache.waits.pause(box), await ask(cache, box, paused=True)


# ---- the four waits ----------------------------------------------------------------------


async def test_pause_waits_for_the_controller(
    cache: Provider, store: FaultyStore, running: Sandbox, looptime: Any
) -> None:
    with cache.waits.pause(running) as task:
        written = await ask(cache, running, paused=True)
        controller = asyncio.create_task(record(store, running.key, Phase.PAUSED, after=3))
        paused = await task.wait(60, written=written)
    assert paused.status.phase is Phase.PAUSED
    assert 3 <= looptime < 3.1
    await controller
    assert cache.waits.is_idle


async def test_resume_waits_until_the_sandbox_is_running_and_ready(
    cache: Provider, store: FaultyStore, looptime: Any
) -> None:
    box = await make(store, sandbox(claim=identity(), paused=True, phase=Phase.PAUSED))
    with cache.waits.resume(box) as task:
        written = await ask(cache, box, paused=False)

        async def controller() -> None:
            await record(store, box.key, Phase.RESUMING, after=1)
            await asyncio.sleep(1)
            current = await store.get(Sandbox, box.key)
            await store.update_status(in_phase(current, Phase.RUNNING, ready=False))
            await record(store, box.key, Phase.RUNNING, after=1)

        working = asyncio.create_task(controller())
        resumed = await task.wait(60, written=written)
    assert resumed.status.phase is Phase.RUNNING
    assert 3 <= looptime < 3.1, "running but not ready is not enough"
    await working


async def test_ready_waits_for_a_new_sandbox(
    cache: Provider, store: FaultyStore, looptime: Any
) -> None:
    box = await cache.write.create(sandbox(phase=Phase.PENDING))
    controller = asyncio.create_task(record(store, box.key, Phase.RUNNING, after=2))
    assert (await cache.waits.ready(box).wait(60)).status.phase is Phase.RUNNING
    assert 2 <= looptime < 2.1
    await controller


async def test_checkpoint_waits_until_it_is_stored_with_its_id(
    cache: Provider, store: FaultyStore
) -> None:
    spec = CheckpointSpec(sandbox_name="box")
    made = await cache.write.create(
        Checkpoint(metadata=ObjectMeta(name="cp", namespace="default"), spec=spec)
    )

    async def controller() -> None:
        current = made
        for status in (
            CheckpointStatus(phase=CheckpointPhase.CREATING),
            CheckpointStatus(phase=CheckpointPhase.SUCCEEDED),
            CheckpointStatus(phase=CheckpointPhase.SUCCEEDED, checkpoint_id="snap"),
        ):
            await asyncio.sleep(1)
            current = await store.update_status(structs.replace(current, status=status))

    working = asyncio.create_task(controller())
    done = await cache.waits.checkpoint(made).wait(60)
    assert done.status.checkpoint_id == "snap"
    await working


async def test_a_failed_checkpoint_ends_the_wait_with_its_reason(
    cache: Provider, store: FaultyStore
) -> None:
    spec = CheckpointSpec(sandbox_name="box")
    made = await cache.write.create(
        Checkpoint(metadata=ObjectMeta(name="cp", namespace="default"), spec=spec)
    )
    failed = CheckpointStatus(phase=CheckpointPhase.FAILED, message="no space left")
    await store.update_status(structs.replace(made, status=failed))
    with pytest.raises(UnavailableError, match="no space left"):
        await cache.waits.checkpoint(made).wait(60)


async def test_deleted_waits_for_the_last_finalizer(
    cache: Provider, store: FaultyStore, looptime: Any
) -> None:
    box = await cache.write.create(with_meta(sandbox(), finalizers=("paddock.dev/sandbox",)))
    dying = await cache.write.delete(box)

    async def controller() -> None:
        await asyncio.sleep(4)
        await store.update(with_meta(await store.get(Sandbox, box.key), finalizers=()))

    working = asyncio.create_task(controller())
    last = await cache.waits.deleted(dying).wait(60)
    assert last.metadata.uid == box.metadata.uid
    assert 4 <= looptime < 4.1
    await working


async def test_waiting_for_the_deletion_of_a_deleted_object_returns_at_once(
    cache: Provider,
) -> None:
    box = await cache.write.create(sandbox())
    await cache.write.delete(box)
    assert await cache.waits.deleted(box).wait(60) is box


# ---- joining and conflicts ---------------------------------------------------------------


async def test_tasks_of_the_same_action_share_the_lock_and_the_result(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    tasks = [cache.waits.pause(running) for _ in range(5)]
    written = await ask(cache, running, paused=True)
    controller = asyncio.create_task(record(store, running.key, Phase.PAUSED, after=1))
    found = await asyncio.gather(*(task.wait(60, written=written) for task in tasks))
    assert {box.status.phase for box in found} == {Phase.PAUSED}
    await controller
    assert cache.waits.is_idle


async def test_the_opposite_action_is_a_conflict_that_names_the_holder(
    cache: Provider, running: Sandbox
) -> None:
    with cache.waits.pause(running, holder="request 4f2a"):
        await asyncio.sleep(7)
        with pytest.raises(ConflictError, match=r"cannot resume .*request 4f2a .*pause for 7 s"):
            cache.waits.resume(running)
        with pytest.raises(ConflictError, match="cannot ready"):
            await cache.waits.ready(running).wait(1)
    cache.waits.resume(running).release()
    assert cache.waits.is_idle


async def test_the_lock_is_held_from_before_the_write_until_the_last_release(
    cache: Provider, running: Sandbox
) -> None:
    first, second = cache.waits.pause(running), cache.waits.pause(running)
    first.release()
    with pytest.raises(ConflictError):
        cache.waits.resume(running)
    second.release()
    cache.waits.resume(running).release()


async def test_a_second_release_does_not_affect_other_holders(
    cache: Provider, running: Sandbox
) -> None:
    first, second = cache.waits.pause(running), cache.waits.pause(running)
    for _ in range(3):
        first.release()
    with pytest.raises(ConflictError):
        cache.waits.resume(running)
    second.release()
    assert cache.waits.is_idle


async def test_ready_and_resume_are_compatible(cache: Provider, running: Sandbox) -> None:
    with cache.waits.resume(running):
        assert (await cache.waits.ready(running).wait(1)).metadata.uid == running.metadata.uid


async def test_ready_and_checkpoint_hold_no_lock_before_they_wait(
    cache: Provider, running: Sandbox
) -> None:
    cache.waits.ready(running)
    assert cache.waits.is_idle
    cache.waits.pause(running).release()


async def test_a_recreated_object_has_its_own_locks(cache: Provider, running: Sandbox) -> None:
    with cache.waits.pause(running):
        await cache.write.delete(running)
        namesake = await cache.write.create(sandbox(claim=identity()))
        cache.waits.resume(namesake).release()


async def test_a_task_can_be_used_once(cache: Provider, running: Sandbox) -> None:
    task = cache.waits.ready(running)
    await task.wait(1)
    with pytest.raises(RuntimeError, match="used once"):
        await task.wait(1)


async def test_an_unreleased_lock_expires(
    cache: Provider, running: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    cache.waits.pause(running, holder="one that crashed")
    await asyncio.sleep(LEASE_SECONDS - 1)
    with pytest.raises(ConflictError):
        cache.waits.resume(running)
    await asyncio.sleep(2)
    cache.waits.resume(running).release()
    assert "action lock expired without release" in caplog.text
    assert cache.waits.is_idle


async def test_a_long_wait_keeps_the_lock(cache: Provider, running: Sandbox) -> None:
    task, written = await begin_pause(cache, running)
    waiting = asyncio.create_task(task.wait(3 * LEASE_SECONDS, written=written))
    await asyncio.sleep(2 * LEASE_SECONDS)
    with pytest.raises(ConflictError):
        cache.waits.resume(running)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert cache.waits.is_idle


# ---- timeouts ----------------------------------------------------------------------------


async def test_a_timeout_names_what_is_missing_and_releases_the_lock(
    cache: Provider, running: Sandbox, looptime: Any
) -> None:
    task, written = await begin_pause(cache, running)
    with pytest.raises(
        DeadlineExceededError,
        match="Sandbox default/box is not paused after 60 s: its phase is Running",
    ):
        await task.wait(60, written=written)
    assert 60 <= looptime < 60.1
    assert cache.waits.is_idle


async def test_a_live_read_is_made_before_the_timeout(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    store.delay = lambda: 1000.0
    task, written = await begin_pause(cache, running)
    await record(store, running.key, Phase.PAUSED)
    assert cache.sandbox(running.key).status.phase is Phase.RUNNING, "the watch is far behind"
    assert (await task.wait(5, written=written)).status.phase is Phase.PAUSED


async def test_the_live_read_before_the_timeout_can_be_disabled(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    store.delay = lambda: 1000.0
    task, written = await begin_pause(cache, running)
    await record(store, running.key, Phase.PAUSED)
    with pytest.raises(DeadlineExceededError):
        await task.wait(5, written=written, is_live_at_end=False)


async def test_live_reads_are_made_while_the_watch_is_broken(
    cache: Provider, store: FaultyStore, running: Sandbox, looptime: Any
) -> None:
    store.watch_errors = [UnavailableError("cut off") for _ in range(1000)]
    store.break_watches(ConnectionResetError("cut"))
    task, written = await begin_pause(cache, running)
    controller = asyncio.create_task(record(store, running.key, Phase.PAUSED, after=2))
    assert (await task.wait(60, written=written)).status.phase is Phase.PAUSED
    assert looptime < 11
    await controller


async def test_a_failed_live_read_does_not_hide_what_is_missing(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    async def broken(kind: Any, key: Key) -> Any:
        raise UnavailableError("the store is down")

    task, written = await begin_pause(cache, running)
    store.get = broken  # type: ignore[attr-defined]
    with pytest.raises(DeadlineExceededError, match="its phase is Running"):
        await task.wait(5, written=written)


async def test_a_timeout_of_zero_checks_once(cache: Provider, running: Sandbox) -> None:
    assert await cache.waits.ready(running).wait(0) == running


# ---- conditions that can never hold ------------------------------------------------------


async def test_a_deletion_ends_the_wait_with_not_found(
    cache: Provider, store: FaultyStore, running: Sandbox, looptime: Any
) -> None:
    task, written = await begin_pause(cache, running)

    async def delete() -> None:
        await asyncio.sleep(2)
        await store.delete(Sandbox, running.key)

    working = asyncio.create_task(delete())
    with pytest.raises(NotFoundError, match="deleted before it was paused"):
        await task.wait(60, written=written)
    assert 2 <= looptime < 2.1
    await working
    assert cache.waits.is_idle


async def test_a_recreated_object_does_not_satisfy_the_wait(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    task = cache.waits.resume(running)

    async def replace() -> None:
        await store.delete(Sandbox, running.key)
        await make(store, sandbox(claim=identity("i2")))

    await replace()
    await asyncio.sleep(1)
    with pytest.raises(NotFoundError):
        await task.wait(60)


async def test_a_sandbox_deleted_earlier_is_not_found_at_once(
    cache: Provider, store: FaultyStore, running: Sandbox, looptime: Any
) -> None:
    await store.delete(Sandbox, running.key)
    await asyncio.sleep(1)
    with pytest.raises(NotFoundError):
        await cache.waits.ready(running).wait(60)
    assert looptime < 2


async def test_the_object_of_the_caller_counts_if_the_cache_is_behind(
    cache: Provider, store: FaultyStore
) -> None:
    store.delay = lambda: 1000.0
    box = await make(store, sandbox())

    async def broken(kind: Any, key: Key) -> Any:
        raise UnavailableError("no live call is needed")

    store.get = broken  # type: ignore[attr-defined]
    assert await cache.waits.ready(box).wait(1) is box


async def test_an_object_outside_the_filter_is_read_live(store: FaultyStore) -> None:
    filters = {Sandbox: Filter(namespace="elsewhere")}
    async with Provider(store, filters=filters, clock=LoopClock(), tick_seconds=1).run() as cache:
        box = await make(store, sandbox(phase=Phase.PENDING))
        controller = asyncio.create_task(record(store, box.key, Phase.RUNNING, after=5))
        assert (await cache.waits.ready(box).wait(60)).status.phase is Phase.RUNNING
        await controller


async def test_a_pause_that_is_reverted_is_a_conflict(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    task, written = await begin_pause(cache, running)

    async def another() -> None:
        await asyncio.sleep(1)
        current = await store.get(Sandbox, running.key)
        await store.update(with_spec(current, paused=False))

    working = asyncio.create_task(another())
    with pytest.raises(ConflictError, match="was resumed while it was being paused"):
        await task.wait(60, written=written)
    await working


async def test_the_write_of_the_caller_counts_if_the_cache_is_behind(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    store.delay = lambda: 2.0
    task = cache.waits.pause(running)
    written = await store.update(with_spec(running, paused=True))
    controller = asyncio.create_task(record(store, running.key, Phase.PAUSED, after=1))
    assert (await task.wait(60, written=written)).spec.paused
    await controller


async def test_a_shutdown_time_that_passes_ends_the_wait(
    cache: Provider, running: Sandbox, looptime: Any
) -> None:
    soon = cache.clock.now() + timedelta(seconds=15)
    task = cache.waits.pause(running)
    written = await ask(cache, running, paused=True, shutdown_time=soon)
    with pytest.raises(ConflictError, match=r"has ended \(ShutdownTimeReached\)"):
        await task.wait(60, written=written)
    assert looptime <= 21


async def test_a_sandbox_that_fails_ends_the_wait_with_its_reason(
    cache: Provider, store: FaultyStore
) -> None:
    box = await cache.write.create(sandbox(phase=Phase.PENDING))
    failed = in_phase(sandbox(message="image not found"), Phase.FAILED).status
    await store.update_status(structs.replace(box, status=failed))
    with pytest.raises(ConflictError, match=r"has ended \(Failed\).*image not found"):
        await cache.waits.ready(box).wait(60)


async def test_a_failed_pause_is_reported_and_an_older_failure_is_not(
    cache: Provider, store: FaultyStore, running: Sandbox
) -> None:
    async def refuse(box: Sandbox) -> Sandbox:
        no = Condition(
            type=CONDITION_PAUSED,
            status=ConditionStatus.FALSE,
            reason=REASON_PAUSE_FAILED,
            message="a device is open",
            observed_generation=box.metadata.generation,
        )
        conditions = set_condition(box.status.conditions, no, now=EPOCH)
        status = structs.replace(box.status, conditions=conditions)
        return await store.update_status(structs.replace(box, status=status))

    await refuse(running)
    await asyncio.sleep(1)
    task, written = await begin_pause(cache, running)
    waiting = asyncio.create_task(task.wait(60, written=written))
    await asyncio.sleep(20)
    assert not waiting.done(), "that refusal was of an earlier attempt"
    refused = await refuse(await store.get(Sandbox, running.key))
    await asyncio.sleep(1)
    assert not waiting.done(), "it is not said to run while it is still told to pause"
    await store.update(with_spec(refused, paused=False))
    with pytest.raises(UnavailableError, match="could not be paused: a device is open"):
        await waiting


# ---- leaks and lost wake-ups -------------------------------------------------------------


async def test_ten_thousand_waits_with_any_result_leave_nothing_behind(
    cache: Provider, store: FaultyStore
) -> None:
    boxes = [await make(store, sandbox(f"box{number}")) for number in range(4)]
    await asyncio.sleep(1)

    fates: Counter[str] = Counter()

    async def one(number: int) -> None:
        box = boxes[number // 5 % 4]
        fate = number % 5
        try:
            if fate == 0:
                await cache.waits.ready(box).wait(1)
            elif fate == 1:
                await cache.waits.resume(box).wait(1)
            elif fate == 2:
                with cache.waits.pause(box):
                    await asyncio.sleep(0.001)
            elif fate == 3:
                await cache.waits.deleted(box).wait(0.01, is_live_at_end=False)
            else:
                waiting = asyncio.create_task(cache.waits.deleted(box).wait(1))
                await asyncio.sleep(0)
                waiting.cancel()
                await waiting
            fates["done"] += 1
        except (PaddockError, asyncio.CancelledError) as error:
            fates[type(error).__name__] += 1

    def count() -> int:
        gc.collect()
        # By type(): `__class__` of a weak proxy is that of its referent, which may be gone.
        return sum(issubclass(type(obj), WaitTask | asyncio.Event) for obj in gc.get_objects())

    for number in range(100):
        await one(number)
    tasks, before = asyncio.all_tasks(), count()
    for start in range(0, 10_000, 100):
        await asyncio.gather(*(one(start + number) for number in range(100)))
    assert fates.total() == 10_100
    assert set(fates) == {"done", "ConflictError", "DeadlineExceededError", "CancelledError"}
    assert cache.waits.is_idle
    assert asyncio.all_tasks() == tasks
    assert count() <= before + 5
    assert len(cache.informer(Sandbox)._handlers) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    starts=st.lists(st.tuples(st.booleans(), st.floats(0, 3)), min_size=1, max_size=8),
    lag=st.floats(0, 2),
    breaks=st.lists(st.floats(0, 4), max_size=3),
    controller_seconds=st.floats(0, 2),
)
async def test_every_waiter_is_woken_and_opposite_actions_never_overlap(
    starts: list[tuple[bool, float]], lag: float, breaks: list[float], controller_seconds: float
) -> None:
    """Callers pause and resume at random while the watch lags and breaks; no caller hangs."""
    inner = MemoryStore(clock=LoopClock())
    store = FaultyStore(inner)
    box = await make(store, sandbox(claim=identity()))
    held: dict[WaitAction, int] = {WaitAction.PAUSE: 0, WaitAction.RESUME: 0}
    loop = asyncio.get_running_loop()

    async def controller() -> None:
        while True:
            await asyncio.sleep(controller_seconds + 0.01)
            current = await store.get(Sandbox, box.key)
            wanted = Phase.PAUSED if current.spec.paused else Phase.RUNNING
            if current.status.phase is not wanted:
                with suppress(ConflictError):
                    await store.update_status(in_phase(current, wanted))

    async def caller(cache: Provider, pauses: bool, at: float) -> str:
        await asyncio.sleep(at)
        action = WaitAction.PAUSE if pauses else WaitAction.RESUME
        try:
            task = cache.waits.pause(box) if pauses else cache.waits.resume(box)
        except ConflictError:
            return "conflict"
        held[action] += 1
        assert not (held[WaitAction.PAUSE] and held[WaitAction.RESUME]), "directions never mix"
        try:
            written = await ask(cache, box, paused=pauses)
            began = loop.time()
            found = await task.wait(30, written=written)
        finally:
            held[action] -= 1
        assert found.status.phase is (Phase.PAUSED if pauses else Phase.RUNNING)
        assert loop.time() - began < 25, "woken, not saved by the last look"
        return "done"

    async def breaker(at: float) -> None:
        await asyncio.sleep(at)
        store.break_watches(ConnectionResetError("cut"))

    async with Provider(store, clock=LoopClock()).run() as cache:
        store.delay = lambda: lag
        working = asyncio.create_task(controller())
        breaking = [asyncio.create_task(breaker(at)) for at in breaks]
        results = await asyncio.gather(*(caller(cache, *start) for start in starts))
        assert "done" in results
        assert cache.waits.is_idle
        working.cancel()
        await asyncio.gather(working, *breaking, return_exceptions=True)
    await inner.close()
