"""A run of code as its caller sees it, and what it asks for."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Ended, Event

GetVariables = Callable[[], Awaitable[Mapping[str, str] | None]]


async def _no_variables() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class RunRequest:
    """Code, and where it runs."""

    code: str
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of the environment for this run alone."""
    generation: str = ""
    """Identifies this clone of the sandbox. In a new one the variables of the sandbox are set
    again, and random generators are seeded again."""
    get_variables: GetVariables = _no_variables
    """Returns the variables of the sandbox; None if they are not known, then a later run asks."""


class Run:
    """The events of a run, and its end."""

    def __init__(self, queue: EventQueue) -> None:
        self.queue = queue
        self.task: asyncio.Task[None] | None = None
        """Runs the code. Whoever reads the events may leave: it goes on."""
        self.is_abandoned = False
        """Whether its caller is gone: it need not begin."""
        self.is_detached = False
        """Whether it goes on without its caller."""
        self.is_limited = False
        """Whether it is interrupted soon, as others wait for it."""

    async def next(self) -> Event:
        """Return the next event; the last one is `Ended`. A cancelled call loses none."""
        return await self.queue.get()

    async def events(self) -> AsyncGenerator[Event]:
        """Yield all events up to the end."""
        while True:
            event = await self.next()
            yield event
            if isinstance(event, Ended):
                return
