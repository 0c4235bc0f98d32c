"""Clocks. Nothing else in Paddock reads the system's time.

Code takes a `Clock`: `SystemClock` in production, in tests a `LoopClock`, whose wall time
follows the event loop's (virtual) time, or a `ManualClock` in synchronous tests.
"""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Wall time for records and deadlines, monotonic time for durations."""

    def now(self) -> datetime:
        """Return the wall time, always in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


class LoopClock:
    """The running event loop's time: virtual if the loop's is."""

    def __init__(self, epoch: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._epoch = epoch

    def now(self) -> datetime:
        """Return the epoch plus the loop's time."""
        return self._epoch + timedelta(seconds=asyncio.get_running_loop().time())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


class ManualClock:
    """A clock that a test advances by hand."""

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = 0.0

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        return self._elapsed

    def advance(self, seconds: float) -> None:
        self._elapsed += seconds


_system: Clock = SystemClock()


def system() -> Clock:
    """Return the machine's clock."""
    return _system


def rfc3339(moment: datetime) -> str:
    """Format a time as Kubernetes does: UTC, whole seconds, `Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
