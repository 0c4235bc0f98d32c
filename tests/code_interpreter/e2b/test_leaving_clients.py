"""What becomes of a run whose client left."""

import asyncio
from typing import Any

import pytest

from code_interpreter.e2b.app import InterpreterApi
from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.run import Run


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
