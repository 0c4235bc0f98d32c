"""Whether time passed in which the process could not run."""

import asyncio
from typing import Any

import pytest

from code_interpreter.e2b.app import InterpreterApi
from code_interpreter.e2b.freezes import Reading, has_jumped
from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.run import Run

BEFORE = Reading(clock=100.0, on_cpu=5.0, waited=1.0)


def test_sleep_work_and_waiting_for_a_cpu_are_no_freeze() -> None:
    assert not has_jumped(BEFORE, Reading(100.1, 5.0, 1.0), slept=0.1)
    assert not has_jumped(BEFORE, Reading(103.1, 8.0, 1.0), slept=0.1)
    assert not has_jumped(BEFORE, Reading(110.1, 5.0, 11.0), slept=0.1)


def test_a_jump_of_the_clock_is_a_freeze() -> None:
    assert has_jumped(BEFORE, Reading(100.4, 5.0, 1.0), slept=0.1)
    assert has_jumped(BEFORE, Reading(3700.0, 5.0, 1.5), slept=0.1)


def test_a_restored_process_was_frozen() -> None:
    assert has_jumped(BEFORE, Reading(100.1, 0.0, 0.0), slept=0.1)


class FakeContext:
    """Records what becomes of a run."""

    def __init__(self) -> None:
        self.decision: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def abandon(self, run: Run) -> None:
        self.decision.set_result("abandoned")

    def detach(self, run: Run) -> None:
        self.decision.set_result("detached")


@pytest.mark.parametrize(("frozen", "decision"), [(True, "detached"), (False, "abandoned")])
async def test_a_run_is_not_dropped_before_it_is_known_why_its_client_left(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, decision: str
) -> None:
    known: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    api = InterpreterApi(Any, Any, Any)
    monkeypatch.setattr(api._freezes, "was_frozen", lambda: known)
    context, run = FakeContext(), Run(EventQueue(1000))
    api._leave(context, run)
    await asyncio.sleep(0)
    assert not run.queue.is_discarded
    known.set_result(frozen)
    assert await context.decision == decision
