"""How fast we may ask: a token bucket that queues callers fairly.

Protects the API server from us. What the server itself asks for (429) is `client`'s business.
"""

import asyncio


class RateLimiter:
    """Lets `rate_per_second` callers pass, `burst` of them at once after a rest."""

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
