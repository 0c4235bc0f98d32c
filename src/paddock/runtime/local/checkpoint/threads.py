"""Work in a thread that may join namespaces, and the way back to whoever waits for it.

A thread that has joined a namespace is of no use for anything else, so each piece of work gets its
own. On the way it may need something done where its caller is: the caller, who waits anyway, does
it.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Home:
    """The caller's thread, as seen from the work's."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, errand: Callable[[], T]) -> T:
        """Have something done in the caller's thread; its result, or what it raised, comes back."""
        return self.begin(errand)()

    def begin(self, errand: Callable[[], T]) -> Callable[[], T]:
        """Have something done in the caller's thread meanwhile; call what you get to wait."""
        outcome: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._errands.put(lambda: outcome.put(_attempt(errand)))
        return lambda: _unpack(outcome.get())

    def serve(self) -> None:
        """Do errands until there will be no more."""
        while (errand := self._errands.get()) is not None:
            errand()

    def leave(self) -> None:
        """Say that there will be no more."""
        self._errands.put(None)


def in_thread(work: Callable[[Home], T], *, name: str) -> T:
    """Run work in a thread that ends with it, doing its errands meanwhile."""
    home = Home()
    outcome: list[_Outcome] = []

    def body() -> None:
        try:
            outcome.append(_attempt(lambda: work(home)))
        finally:
            home.leave()

    thread = threading.Thread(target=body, name=name)
    thread.start()
    home.serve()
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
