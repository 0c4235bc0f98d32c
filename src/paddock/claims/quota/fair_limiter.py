"""Fair admission of cold creates: one rate for all tenants, shared round-robin.

Tenants wait in queues of their own and are served in turn, so that a tenant that asks for a
thousand sandboxes does not delay another tenant's first.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque

from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError

_TENANT_SHARE = 4
"""One tenant may have at most this fraction (1/n) of all waiting creates."""


class FairLimiter:
    """A token bucket whose tokens go to waiting tenants round-robin."""

    def __init__(
        self, clock: Clock, *, per_second: float, burst: int, max_waiting: int = 10_000
    ) -> None:
        self._clock = clock
        self._rate = per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at = clock.monotonic()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._waiting = 0
        self._max_waiting = max_waiting
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of creates that wait now."""
        return self._waiting

    async def acquire(self, tenant: str) -> None:
        """Wait for this tenant's turn; cancel to give up, as a timeout does.

        `RateLimitedError` if too many wait already.
        """
        self._refill()
        if not self._queues and self._tokens >= 1:
            self._tokens -= 1
            return
        mine = self._queues.get(tenant, ())
        if self._waiting >= self._max_waiting or len(mine) >= self._max_waiting // _TENANT_SHARE:
            raise RateLimitedError(
                f"{max(len(mine), self._waiting)} creations are waiting already",
                retry_after_seconds=5,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        self._waiting += 1
        self._arm()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._tokens = min(self._tokens + 1, self._burst)
                self._serve()
            raise
        finally:
            self._waiting -= 1
            self._forget(tenant, turn)

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(tenant)
        if queue is None:
            return
        with contextlib.suppress(ValueError):
            queue.remove(turn)
        if not queue:
            del self._queues[tenant]

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now

    def _serve(self) -> None:
        self._refill()
        # Slightly below one counts: the timer may fire early by a rounding error.
        while self._queues and self._tokens >= 1 - 1e-9:
            tenant, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            if not turn.done():
                self._tokens -= 1
                turn.set_result(None)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queues:
            self._refill()
            wait = max((1 - self._tokens) / self._rate, 0.0)
            self._timer = asyncio.get_running_loop().call_later(wait, self._serve)
