"""Fair admission of cold creates: one rate for all tenants, shared round-robin.

Tenants wait in queues of their own and are served in turn, so that a tenant that asks for a
thousand sandboxes does not delay another tenant's first.
"""

import asyncio

from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError
from paddock.kit.fair.queue import FairQueue

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
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._max_waiting = max_waiting
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of creates that wait now."""
        return len(self._waiting)

    async def acquire(self, tenant: str) -> None:
        """Wait for this tenant's turn; cancel to give up, as a timeout does.

        `RateLimitedError` if too many wait already.
        """
        self._refill()
        if not self._waiting and self._tokens >= 1:
            self._tokens -= 1
            return
        mine, waiting = self._waiting.count(tenant), len(self._waiting)
        if waiting >= self._max_waiting or mine >= self._max_waiting // _TENANT_SHARE:
            raise RateLimitedError(
                f"{max(mine, waiting)} creations are waiting already",
                retry_after_seconds=5,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(tenant, turn)
        self._arm()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(tenant, turn)
            else:  # it was granted before the cancellation arrived
                self._tokens = min(self._tokens + 1, self._burst)
                self._serve()
            raise

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now

    def _serve(self) -> None:
        self._refill()
        # Slightly below one counts: the timer may fire early by a rounding error.
        while self._tokens >= 1 - 1e-9 and (found := self._waiting.pop()) is not None:
            _, turn = found
            if not turn.done():
                self._tokens -= 1
                turn.set_result(None)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._refill()
            wait = max((1 - self._tokens) / self._rate, 0.0)
            self._timer = asyncio.get_running_loop().call_later(wait, self._serve)
