"""A queue of keys for workers: deduplicating, delayed, rate limited, fair.

- A waiting key is in the queue once, however often it is added.
- A key is never in two workers at once: added while it is processed, it is due again after `done`.
- Of several delays of one key the earliest counts.
- `retry` backs off after every failure of the key, until `forget`.
- Keys of a group (a team) are handed out in the order in which they became due, groups in turns:
  none starves. With `slots`, a group leaves some of them to others, however slow its keys are.

Everything runs on the event loop and uses its clock.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

from paddock.kit import metrics
from paddock.kit.backoff import Backoff
from paddock.kit.fair.queue import FairQueue, may_start

K = TypeVar("K", bound=Hashable)

_DEPTH = metrics.gauge("paddock_queue_depth", "Keys waiting for a worker.", ("queue",))
_WAITED = metrics.histogram("paddock_queue_seconds", "From due to handed out.", ("queue",))
_RETRIES = metrics.counter(
    "paddock_queue_retries_total", "Keys put back after failure.", ("queue",)
)

LEAST_SECONDS = 0.001
"""The shortest delay."""
RETRY = Backoff(base_seconds=0.005, cap_seconds=120.0, jitter=0.1)


class QueueClosed(Exception):  # noqa: N818 - an end, not an error
    """The queue is closed."""


class WorkQueue(Generic[K]):
    """A queue of keys to reconcile."""

    def __init__(
        self,
        name: str,
        *,
        backoff: Backoff = RETRY,
        group_of: Callable[[K], str] | None = None,
        slots: int | None = None,
    ) -> None:
        """`slots`: how many keys are processed at once, of which a group leaves some free."""
        self.name = name
        self._backoff = backoff
        self._group_of = group_of if group_of is not None else _one_group
        self._slots = slots
        self._taken: dict[K, str] = {}
        """Keys in process that count against the slots, and their groups."""
        self._running: Counter[str] = Counter()
        """Slots in use, by group."""
        self._ready: FairQueue[K] = FairQueue()
        self._due_since: dict[K, float] = {}
        """Every key of `_ready`, and every key that is due again after `done`."""
        self._processing: set[K] = set()
        self._failures: dict[K, int] = {}
        self._deadlines: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        """Has stale entries too: only the one in `_deadlines` counts."""
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._getters: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._depth = _DEPTH.labels(name)
        self._waited = _WAITED.labels(name)
        self._retries = _RETRIES.labels(name)

    def __len__(self) -> int:
        """Return the number of keys that are due and not in process."""
        return len(self._ready)

    @property
    def is_idle(self) -> bool:
        """Whether no key is due, delayed or in process."""
        return not (self._due_since or self._processing or self._deadlines)

    @property
    def delayed(self) -> int:
        """The number of delayed keys."""
        return len(self._deadlines)

    def add(self, key: K) -> None:
        """Make the key due now."""
        if self._closed or key in self._due_since:
            return
        self._due_since[key] = asyncio.get_running_loop().time()
        if key not in self._processing:
            self._make_ready(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Make the key due after a delay; an earlier time stays."""
        if seconds <= 0:
            self.add(key)
            return
        if self._closed:
            return
        # What rounding leaves of a deadline may be less than the clock's resolution: a caller
        # that adds so little again and again would never see it pass.
        when = asyncio.get_running_loop().time() + max(seconds, LEAST_SECONDS)
        known = self._deadlines.get(key)
        if known is not None and known <= when:
            return
        self._deadlines[key] = when
        heapq.heappush(self._heap, (when, next(self._order), key))
        self._compact()
        self._set_timer()

    def cancel(self, key: K) -> None:
        """Cancel the delay of a key: one of hours would outlive its object."""
        if self._deadlines.pop(key, None) is not None:
            self._compact()

    def retry(self, key: K) -> float:
        """Make the key due after its backoff; returns the seconds."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        self._retries.inc()
        seconds = self._backoff.delay(failures)
        self.add_after(key, seconds)
        return seconds

    def failures(self, key: K) -> int:
        """Return the number of failures of the key in a row."""
        return self._failures.get(key, 0)

    def forget(self, key: K) -> None:
        """Reset the key's failures."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a due key and return it; `done` must follow. `QueueClosed` when closed."""
        while (key := self._next()) is None:
            if self._closed:
                raise QueueClosed(self.name)
            getter = asyncio.get_running_loop().create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # Woken and cancelled in the same turn: pass the wake-up to another worker.
                if getter.done() and not getter.cancelled() and self._ready:
                    self._wake_one()
                raise
        if self._closed:
            raise QueueClosed(self.name)
        self._depth.set(len(self._ready))
        self._processing.add(key)
        if self._ready and self._getters:
            self._wake_one()  # there may be slots for more keys than were added
        self._waited.observe(asyncio.get_running_loop().time() - self._due_since.pop(key))
        return key

    def done(self, key: K) -> None:
        """Finish the key; it is due at once if it was added meanwhile."""
        if key not in self._processing:
            raise RuntimeError(f"{key!r} is not in process in queue {self.name}")
        self._processing.discard(key)
        self.release_slot(key)
        if key in self._due_since and not self._closed:
            self._make_ready(key)

    def release_slot(self, key: K) -> None:
        """Let a key in process no longer count against the slots: another worker replaces its."""
        group = self._taken.pop(key, None)
        if group is None:
            return
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]
        if self._ready:
            self._wake_one()

    def _next(self) -> K | None:
        """Remove and return a due key that has a slot."""
        if not self._ready:
            return None
        if self._slots is None:
            found = self._ready.pop()
            return None if found is None else found[1]
        found = self._ready.pop(self._has_slot)
        if found is None:
            return None
        group, key = found
        self._taken[key] = group
        self._running[group] += 1
        return key

    def _has_slot(self, group: str) -> bool:
        return may_start(self._running[group], (self._slots or 0) - len(self._taken))

    def close(self) -> None:
        """Close the queue and drop its keys; `get` raises `QueueClosed`."""
        self._closed = True
        self._ready.clear()
        self._due_since.clear()
        self._deadlines.clear()
        self._heap.clear()
        self._failures.clear()
        self._depth.set(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._getters:
            self._wake_one()

    def _make_ready(self, key: K) -> None:
        self._ready.push(self._group_of(key), key)
        self._depth.set(len(self._ready))
        self._wake_one()

    def _wake_one(self) -> None:
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(None)
                return

    def _set_timer(self, *, earliest: float = 0.0) -> None:
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._timer is not None:
            if self._heap and self._timer_at == self._heap[0][0]:
                return
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer_at = self._heap[0][0]
            self._timer = asyncio.get_running_loop().call_at(
                max(self._timer_at, earliest), self._expire
            )

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            if self._deadlines.get(key) == when:
                del self._deadlines[key]
                self.add(key)
        # uvloop rounds delays to milliseconds, so it may call too early. Without a least delay it
        # would call again and again until the time has come.
        self._set_timer(earliest=now + LEAST_SECONDS)

    def _compact(self) -> None:
        # A key whose time is moved again and again would fill the heap otherwise.
        if len(self._heap) > 2 * len(self._deadlines) + 64:
            live = [entry for entry in self._heap if self._deadlines.get(entry[2]) == entry[0]]
            heapq.heapify(live)
            self._heap = live


def _one_group(_key: Hashable) -> str:
    return ""
