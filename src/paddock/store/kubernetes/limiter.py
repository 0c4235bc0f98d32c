"""How fast we may ask: a token bucket that queues callers fairly.

Protects the API server from this process. Responses with 429 are handled in `client`.
"""

import asyncio


class RateLimiter:
    """A token bucket: `rate_per_second` requests, `burst` of them at once."""

    def __init__(self, rate_per_second: float, burst: int) -> None:
        self._interval = 1.0 / rate_per_second
        self._slack = burst * self._interval
        self._next = float("-inf")
        """When the bucket would be full again had nobody else come."""

    async def acquire(self) -> float:
        """Wait for a turn, in order of arrival; give the seconds waited."""
        now = asyncio.get_running_loop().time()
        # Each caller takes the next slot at once, so those who come later wait behind it.
        self._next = max(self._next, now - self._slack) + self._interval
        wait = self._next - now
        if wait <= 0:
            return 0.0
        await asyncio.sleep(wait)
        return wait
