"""Parts start in order, stop in reverse, and fail together."""

import asyncio
import os
import signal
from typing import Any

import pytest

from paddock.engine.supervisor import (
    ForcedStop,
    Part,
    PartEndedError,
    StartGroup,
    Supervisor,
    stopping_on_signals,
)
from paddock.kit.errors import DeadlineExceededError, UnavailableError

pytestmark = pytest.mark.looptime


class Story:
    """Creates parts that record their calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def part(
        self,
        name: str,
        group: StartGroup,
        *,
        ready_after: float | None = None,
        stops_after: float = 0.0,
        fails_after: float | None = None,
        ends_after: float | None = None,
        **more: Any,
    ) -> Part:
        async def run() -> None:
            self.lines.append(f"+{name}")
            try:
                if fails_after is not None:
                    await asyncio.sleep(fails_after)
                    raise UnavailableError(f"{name} broke")
                await asyncio.sleep(ends_after if ends_after is not None else 1_000_000)
            finally:
                if stops_after:
                    await asyncio.sleep(stops_after)
                self.lines.append(f"-{name}")

        async def ready() -> None:
            await asyncio.sleep(ready_after or 0)
            self.lines.append(f"={name}")

        return Part(
            name=name,
            group=group,
            run=run,
            ready=ready if ready_after is not None else None,
            **more,
        )


@pytest.fixture
def story() -> Story:
    return Story()


async def run_for(supervisor: Supervisor, seconds: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await asyncio.sleep(seconds)
        supervisor.stop()


async def test_a_group_starts_when_the_previous_is_ready_and_groups_stop_in_reverse(
    story: Story,
) -> None:
    supervisor = Supervisor()
    for name, group, seconds in (
        ("controllers", StartGroup.LEADERS, None),
        ("recorder", StartGroup.OTHERS, None),
        ("cache", StartGroup.CACHES, 5.0),
        ("http", StartGroup.HTTP, 1.0),
    ):
        supervisor.add(story.part(name, group, ready_after=seconds))
    await run_for(supervisor, 100)
    assert story.lines == [
        *("+http", "=http", "+cache", "=cache", "+recorder", "+controllers"),
        *("-controllers", "-recorder", "-cache", "-http"),
    ]


async def test_it_is_started_from_the_last_ready_to_the_first_stop(story: Story) -> None:
    supervisor = Supervisor()
    supervisor.add(story.part("cache", StartGroup.CACHES, ready_after=5))
    supervisor.add(story.part("slow", StartGroup.OTHERS, stops_after=5))
    task = asyncio.create_task(supervisor.run())
    await asyncio.sleep(4)
    assert not supervisor.is_started
    await asyncio.sleep(2)
    assert supervisor.is_started
    supervisor.stop()
    assert not supervisor.is_started
    await task


async def test_the_first_failure_stops_all_and_is_raised(story: Story, looptime: Any) -> None:
    supervisor = Supervisor()
    supervisor.add(story.part("http", StartGroup.HTTP))
    supervisor.add(story.part("bad", StartGroup.OTHERS, fails_after=3))
    supervisor.add(story.part("good", StartGroup.OTHERS, stops_after=1))
    with pytest.raises(UnavailableError, match="bad broke"):
        await supervisor.run()
    assert looptime == 4
    assert story.lines[-2:] == ["-good", "-http"]


async def test_a_part_that_fails_during_start_aborts_the_start(story: Story) -> None:
    supervisor = Supervisor()
    supervisor.add(story.part("http", StartGroup.HTTP, fails_after=2))
    supervisor.add(story.part("cache", StartGroup.CACHES, ready_after=1000))
    supervisor.add(story.part("later", StartGroup.OTHERS))
    with pytest.raises(UnavailableError, match="http broke"):
        await supervisor.run()
    assert "+later" not in story.lines
    assert "-cache" in story.lines


async def test_failed_readiness_aborts_the_start_with_its_error(story: Story) -> None:
    async def never() -> None:
        raise UnavailableError("the cache did not sync")

    async def run() -> None:
        await asyncio.sleep(1_000_000)

    supervisor = Supervisor()
    supervisor.add(Part(name="cache", group=StartGroup.CACHES, run=run, ready=never))
    supervisor.add(story.part("later", StartGroup.OTHERS))
    with pytest.raises(UnavailableError, match="the cache did not sync"):
        await supervisor.run()
    assert story.lines == []


async def test_a_part_that_returns_is_a_failure_unless_it_is_finite(story: Story) -> None:
    supervisor = Supervisor()
    supervisor.add(story.part("migration", StartGroup.OTHERS, ends_after=1, is_finite=True))
    supervisor.add(story.part("server", StartGroup.OTHERS, ends_after=5))
    with pytest.raises(PartEndedError, match="server ended by itself"):
        await supervisor.run()


async def test_start_has_a_deadline(story: Story, looptime: Any) -> None:
    supervisor = Supervisor(start_seconds=20)
    supervisor.add(story.part("cache", StartGroup.CACHES, ready_after=1000))
    with pytest.raises(DeadlineExceededError, match="start-up took longer than 20 s"):
        await supervisor.run()
    assert looptime == 20
    assert story.lines == ["+cache", "-cache"]


async def test_a_stop_during_start_starts_no_more_parts(story: Story) -> None:
    supervisor = Supervisor()
    supervisor.add(story.part("cache", StartGroup.CACHES, ready_after=1000))
    supervisor.add(story.part("later", StartGroup.OTHERS))
    await run_for(supervisor, 5)
    assert story.lines == ["+cache", "-cache"]


async def test_stop_has_one_deadline_and_names_the_parts_that_missed_it(
    story: Story, looptime: Any
) -> None:
    supervisor = Supervisor(stop_seconds=10)
    supervisor.add(story.part("http", StartGroup.HTTP))
    supervisor.add(story.part("stubborn", StartGroup.OTHERS, stops_after=50))
    supervisor.add(story.part("slow", StartGroup.LEADERS, stops_after=8))
    task = asyncio.create_task(supervisor.run())
    await asyncio.sleep(1)
    supervisor.stop()
    with pytest.raises(DeadlineExceededError, match="did not stop within 10 s: stubborn"):
        await task
    assert looptime < 11.2
    assert story.lines[-1] == "-http", "the others are stopped nevertheless"
    await asyncio.sleep(60)


async def test_a_second_stop_request_does_not_wait(story: Story, looptime: Any) -> None:
    supervisor = Supervisor(stop_seconds=1000)
    supervisor.add(story.part("stubborn", StartGroup.OTHERS, stops_after=500))
    task = asyncio.create_task(supervisor.run())
    await asyncio.sleep(1)
    supervisor.stop()
    await asyncio.sleep(5)
    supervisor.stop()
    with pytest.raises(ForcedStop, match="without waiting for: stubborn"):
        await task
    assert looptime < 6.2
    await asyncio.sleep(1000)


async def test_a_failure_is_raised_even_if_other_parts_do_not_stop(story: Story) -> None:
    supervisor = Supervisor(stop_seconds=5)
    supervisor.add(story.part("stubborn", StartGroup.OTHERS, stops_after=50))
    supervisor.add(story.part("bad", StartGroup.OTHERS, fails_after=3))
    with pytest.raises(UnavailableError, match="bad broke"):
        await supervisor.run()
    await asyncio.sleep(60)


async def test_cancelling_the_supervisor_stops_all_parts_in_order(story: Story) -> None:
    supervisor = Supervisor()
    supervisor.add(story.part("http", StartGroup.HTTP))
    supervisor.add(story.part("work", StartGroup.OTHERS, stops_after=2))
    task = asyncio.create_task(supervisor.run())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert story.lines == ["+http", "+work", "-work", "-http"]


async def test_no_task_is_left_behind(story: Story) -> None:
    before = asyncio.all_tasks()
    supervisor = Supervisor()
    for group in StartGroup:
        supervisor.add(story.part(group.name, group, ready_after=1))
    await run_for(supervisor, 50)
    assert asyncio.all_tasks() == before


async def test_signals_request_a_stop_and_handlers_are_restored(story: Story) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    supervisor = Supervisor()
    supervisor.add(story.part("work", StartGroup.OTHERS))
    async with stopping_on_signals(supervisor, signal.SIGUSR1):
        task = asyncio.create_task(supervisor.run())
        await asyncio.sleep(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        await task
    assert story.lines == ["+work", "-work"]
    assert signal.getsignal(signal.SIGUSR1) == before
