"""The queue between a kernel, which produces events, and the caller, who may read slowly.

A full queue stops the kernel; an empty enough one continues it. So output waits in the kernel's own
process, and the memory of the server stays bounded however much is printed.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from code_interpreter.kernels.events import Event, Output, Result

_FULL = 2 << 20
_LOW = _FULL // 4
_EACH = 200
"""What an event costs besides its text."""


def size_of(event: Event) -> int:
    """Return about how many bytes an event occupies."""
    match event:
        case Output(text=text):
            return len(text) + _EACH
        case Result(data=data):
            # Values that are not text were parsed from JSON; their exact size does not matter.
            sizes = (len(v) if isinstance(v, str) else len(repr(v)) for v in data.values())
            return sum(sizes) + _EACH * (1 + len(data))
        case _:
            return _EACH


class EventQueue:
    """Events of one run, in order."""

    def __init__(self, max_bytes: int) -> None:
        self._events: deque[tuple[Event, int]] = deque()
        self.waiting_bytes = 0
        """About how much memory the events occupy."""
        self._left = max_bytes
        self._is_full = False
        self._is_discarded = False
        self._arrived = asyncio.Event()
        self.on_full: Callable[[], None] = nothing
        """Called when the kernel has to stop producing."""
        self.on_low: Callable[[], None] = nothing
        """Called when it may continue."""
        self.on_limit: Callable[[], None] = nothing
        """Called once when the run has produced more than it may."""

    @property
    def is_over_limit(self) -> bool:
        """Whether the run has produced more than it may; further output is dropped."""
        return self._left < 0

    @property
    def is_full(self) -> bool:
        """Whether the kernel is stopped until events were read."""
        return self._is_full

    @property
    def is_discarded(self) -> bool:
        """Whether nobody reads the events anymore."""
        return self._is_discarded

    def put(self, event: Event) -> None:
        """Add an event."""
        size = size_of(event)
        if isinstance(event, Output | Result) and not self._has_room(size):
            return
        if self._is_discarded:
            return
        self._events.append((event, size))
        self.waiting_bytes += size
        self._arrived.set()
        if self.waiting_bytes >= _FULL and not self._is_full:
            self._is_full = True
            self.on_full()

    async def get(self) -> Event:
        """Return the next event. A cancelled call loses none."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event, size = self._events.popleft()
        self.waiting_bytes -= size
        if self.waiting_bytes <= _LOW:
            self._continue()
        return event

    def discard(self) -> None:
        """Drop all events from now on: the caller is gone."""
        self._is_discarded = True
        self._events.clear()
        self.waiting_bytes = 0
        self._continue()

    def _has_room(self, size: int) -> bool:
        if self.is_over_limit:
            return False
        self._left -= size
        if self.is_over_limit:
            self.on_limit()
        return not self.is_over_limit

    def _continue(self) -> None:
        if self._is_full:
            self._is_full = False
            self.on_low()


def nothing() -> None:
    """Do nothing."""
