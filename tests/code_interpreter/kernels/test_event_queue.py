"""The queue of a run: bounded, in order, and it stops a kernel that is too fast."""

import asyncio

from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Ended, Failure, Output, Result

PIECE = Output("stdout", "x" * 100_000)


async def test_a_full_queue_stops_the_kernel_until_it_was_read() -> None:
    queue, signals = EventQueue(1 << 30), []
    queue.on_full = lambda: signals.append("stop")
    queue.on_low = lambda: signals.append("go on")
    for _ in range(30):
        queue.put(PIECE)
    assert signals == ["stop"]
    for _ in range(30):
        assert await queue.get() == PIECE
    assert signals == ["stop", "go on"]


async def test_a_run_has_a_limit_of_output_but_reports_its_end() -> None:
    queue, reached = EventQueue(250_000), []
    queue.on_limit = lambda: reached.append(True)
    for _ in range(5):
        queue.put(PIECE)
    queue.put(Failure("X", "y"))
    assert [await queue.get() for _ in range(3)] == [PIECE, PIECE, Failure("X", "y")]
    assert reached == [True]
    assert queue.is_over_limit


async def test_a_caller_that_is_gone_stops_nothing() -> None:
    queue, signals = EventQueue(1 << 30), []
    queue.on_full, queue.on_low = (lambda: signals.append(1)), (lambda: signals.append(0))
    for _ in range(30):
        queue.put(PIECE)
    queue.discard()
    for _ in range(100):
        queue.put(PIECE)
    assert signals == [1, 0]


async def test_a_cancelled_read_loses_nothing() -> None:
    queue = EventQueue(1000)
    reading = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    reading.cancel()
    queue.put(Ended())
    assert await queue.get() == Ended()


async def test_results_without_content_count_too() -> None:
    queue, signals = EventQueue(1 << 30), []
    queue.on_full = lambda: signals.append("stop")
    for _ in range(20_000):
        queue.put(Result({}, is_main=False))
    assert signals == ["stop"]
