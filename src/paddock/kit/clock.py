"""Where time comes from. Nothing else in Paddock asks the system for it.

Code takes a `Clock`; production hands it `SystemClock`, tests a `LoopClock`, whose
wall time follows the event loop's (virtual) time, or a `ManualClock` for synchronous tests.
"""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Wall time for records and deadlines, monotonic time for measuring."""

    def now(self) -> datetime:
        """Give the wall time, always with zone UTC."""
        ...

    def monotonic(self) -> float:
        """Give seconds that never go back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Give the machine's wall time."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Give the machine's monotonic time."""
        return time.monotonic()


class LoopClock:
    """Time of the running event loop: virtual where the loop's is."""

    def __init__(self, epoch: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._epoch = epoch

    def now(self) -> datetime:
        """Give the epoch plus the loop's time."""
        return self._epoch + timedelta(seconds=asyncio.get_running_loop().time())

    def monotonic(self) -> float:
        """Give the loop's time."""
        return asyncio.get_running_loop().time()


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = 0.0

    def now(self) -> datetime:
        """Give the start plus what was advanced."""
        return self._start + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        """Give what was advanced."""
        return self._elapsed

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        self._elapsed += seconds


_system: Clock = SystemClock()


def system() -> Clock:
    """Give the machine's clock."""
    return _system


def rfc3339(moment: datetime) -> str:
    """Write a moment as Kubernetes does: UTC, whole seconds, `Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
