"""Run work in a thread that may enter namespaces, with calls back to the caller's thread.

A thread that has entered a namespace cannot be reused, so each piece of work gets its own. Calls
that must run outside the namespace are executed by the caller's thread, which waits for the work.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class CallerThread:
    """Runs functions in the caller's thread, on behalf of the worker thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, call: Callable[[], T]) -> T:
        """Run a function in the caller's thread; return its result or raise its exception."""
        return self.submit(call)()

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """Start a function in the caller's thread; return a function that waits for its result."""
        outcome: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._calls.put(lambda: outcome.put(_attempt(call)))
        return lambda: _unpack(outcome.get())

    def serve(self) -> None:
        """Execute calls until `leave`."""
        while (call := self._calls.get()) is not None:
            call()

    def leave(self) -> None:
        """End `serve`."""
        self._calls.put(None)


def run_in_thread(work: Callable[[CallerThread], T], *, name: str) -> T:
    """Run `work` in a new thread, and serve its calls in this thread until it ends."""
    caller = CallerThread()
    outcome: list[_Outcome] = []

    def body() -> None:
        try:
            outcome.append(_attempt(lambda: work(caller)))
        finally:
            caller.leave()

    thread = threading.Thread(target=body, name=name)
    thread.start()
    caller.serve()
    thread.join()
    return _unpack(outcome[0])


_Outcome = tuple[Any, BaseException | None]


def _attempt(work: Callable[[], Any]) -> _Outcome:
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001 - raised again in the other thread
        return None, error


def _unpack(outcome: _Outcome) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result
