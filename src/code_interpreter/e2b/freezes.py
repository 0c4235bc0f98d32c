"""Whether the sandbox was frozen when a client left.

A pause of the sandbox ends the connections of its clients, just before it or after it. A run then
goes on; it is interrupted only if the client itself has left. A frozen process cannot notice that
it is frozen, but its clock jumps: much more time has passed than it slept and waited for a CPU.
"""

import asyncio
import contextlib
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_TICK_SECONDS = 0.1
_JUMP_SECONDS = 0.15
"""A tick that is late by more than this, although the process could have run, means a freeze."""
_GRACE_SECONDS = 1.0
"""A sandbox is frozen within this time after its connections were ended."""


class Reading(NamedTuple):
    """A moment, as the process sees it."""

    clock: float
    """Seconds."""
    on_cpu: float
    """Seconds that the process has run."""
    waited: float
    """Seconds that the process was ready to run, but another one had the CPU."""


def has_jumped(before: Reading, after: Reading, slept: float) -> bool:
    """Whether the process was frozen between two readings."""
    if after.on_cpu < before.on_cpu or after.waited < before.waited:
        return True  # a restored process counts from 0
    busy = (after.on_cpu - before.on_cpu) + (after.waited - before.waited)
    return after.clock - before.clock - busy > slept + _JUMP_SECONDS


def read() -> Reading:
    """Return the present reading."""
    try:
        on_cpu, waited, _ = _SCHEDSTAT.read_text().split()
        return Reading(time.monotonic(), int(on_cpu) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return Reading(time.monotonic(), 0.0, 0.0)


class FreezeWatch:
    """Watches the clock while code runs."""

    def __init__(self) -> None:
        self._users = 0
        self._task: asyncio.Task[None] | None = None
        self._last = read()
        self._frozen_at = float("-inf")

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Watch while code runs; an idle server has no timers."""
        self._users += 1
        if self._task is None:
            self._last = read()
            self._task = asyncio.create_task(self._watch(), name="clock")
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._task.cancel()
                self._task = None

    async def was_frozen(self) -> bool:
        """Whether the sandbox was frozen just before now, or is within a moment."""
        began = time.monotonic()
        with self.running():
            self._look()
            while time.monotonic() - began < _GRACE_SECONDS:
                if self._frozen_at >= began - _GRACE_SECONDS:
                    return True
                await asyncio.sleep(_TICK_SECONDS)
        return self._frozen_at >= began - _GRACE_SECONDS

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._look()

    def _look(self) -> None:
        now = read()
        if has_jumped(self._last, now, _TICK_SECONDS):
            self._frozen_at = now.clock
        self._last = now
