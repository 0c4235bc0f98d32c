"""When a run has ended: by its messages, or by the mark of a kernel that reports it too early."""

import asyncio

import pytest

from code_interpreter.kernels import pending
from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Output, Result
from code_interpreter.kernels.pending import PendingRun
from code_interpreter.kernels.wire import Message

RUN, MARK = "run", "mark"
VALUE = {"data": {"text/plain": "3"}}
REPLY = {"status": "ok"}


@pytest.fixture
def queue() -> EventQueue:
    return EventQueue(1 << 30)


@pytest.fixture
def marked(queue, monkeypatch) -> PendingRun:
    """A run of a kernel that prints a mark, and waits for nothing that is late."""
    monkeypatch.setattr(pending, "_LATE_SECONDS", 0.0)
    run = PendingRun(RUN, queue)
    run.mark_request = MARK
    return run


def idle(parent: str) -> Message:
    return Message("status", parent, {"execution_state": "idle"})


def printed(parent: str, text: str) -> Message:
    return Message("stream", parent, {"name": "stdout", "text": text})


async def test_a_kernel_without_a_mark_has_ended_when_it_is_idle(queue) -> None:
    run = PendingRun(RUN, queue)
    run.take(Message("execute_result", RUN, VALUE))
    run.take(idle(RUN))
    assert run.ended.is_set()
    assert await queue.get() == Result(VALUE["data"], is_main=True)


async def test_output_and_value_that_the_kernel_ascribes_to_the_mark_belong_to_the_run(
    queue, marked
) -> None:
    mark = marked.expect_mark()
    for message in (
        idle(RUN),
        Message("status", MARK, {"execution_state": "busy"}),
        Message("execute_input", MARK, {"execution_count": 1}),
        printed(MARK, "late\n"),
        Message("execute_result", MARK, VALUE),
    ):
        marked.take(message)
    assert not marked.ended.is_set()
    marked.take(printed(MARK, f"{mark}\n"))
    assert marked.ended.is_set()
    assert await queue.get() == Output("stdout", "late\n")
    assert await queue.get() == Result(VALUE["data"], is_main=True)


async def test_a_busy_kernel_may_take_any_time_from_the_reply_to_the_mark(marked) -> None:
    marked.expect_mark()
    marked.take_reply(Message("execute_reply", RUN, REPLY))
    await _let_timers_expire()
    assert not marked.ended.is_set()


async def test_a_mark_that_was_lost_is_not_waited_for(marked) -> None:
    marked.take_reply_to_mark()
    await asyncio.wait_for(marked.ended.wait(), 60)


async def test_a_kernel_that_is_stopped_by_a_slow_reader_has_not_ended(queue, marked) -> None:
    queue.put(Output("stdout", "x" * (4 << 20)))
    marked.take_reply_to_mark()
    await _let_timers_expire()
    assert not marked.ended.is_set()
    await queue.get()
    await asyncio.wait_for(marked.ended.wait(), 60)


async def _let_timers_expire() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
