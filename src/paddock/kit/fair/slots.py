"""A bounded number of slots for heavy work, shared fairly between groups.

Each piece of work holds one slot while it runs. There is a bound for all groups together and one
for each group; groups wait in turns (see `queue`). Work that is cancelled while it waits
leaves the queue, and its slot goes to the next one.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator

from paddock.kit.fair.queue import FairQueue, may_start


class FairSlots:
    """Slots that groups take in turns."""

    def __init__(self, *, total: int, per_group: int) -> None:
        if total < 1 or per_group < 1:
            raise ValueError("there must be at least one slot in total and per group")
        self.total = total
        self.per_group = per_group
        self.running = 0
        """The number of slots in use."""
        self._running: Counter[str] = Counter()
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def waiting(self) -> int:
        """The number of pieces of work that wait."""
        return len(self._waiting)

    def would_wait(self, group: str) -> bool:
        """Whether further work of this group would have to wait now."""
        return not self._is_allowed(group)

    @contextlib.asynccontextmanager
    async def slot(self, group: str, lane: str = "") -> AsyncGenerator[None]:
        """Wait for a slot of this group and hold it."""
        await self._acquire(group, lane)
        try:
            yield
        finally:
            self._release(group, lane)

    async def _acquire(self, group: str, lane: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(group, turn, lane)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(group, turn, lane)
            else:
                self._release(group, lane)  # it was granted before the cancellation arrived
            raise

    def _release(self, group: str, lane: str) -> None:
        # Others wait for this operation only, not for the next one of the same group.
        self._waiting.defer(group, lane)
        self.running -= 1
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]
        self._serve()

    def _is_allowed(self, group: str) -> bool:
        running = self._running[group]
        return running < self.per_group and may_start(running, self.total - self.running)

    def _serve(self) -> None:
        while (found := self._waiting.pop(self._is_allowed)) is not None:
            group, turn = found
            if turn.done():  # cancelled, and its task has not run since
                continue
            self.running += 1
            self._running[group] += 1
            turn.set_result(None)
