"""Client-side rate limit: a token bucket that serves callers in order.

Limits the load on the API server. Responses with status 429 are handled in `client`.
"""

import asyncio


class RateLimiter:
    """A token bucket: `rate_per_second` requests, `burst` of them at once."""

    def __init__(self, rate_per_second: float, burst: int) -> None:
        self._interval = 1.0 / rate_per_second
        self._slack = burst * self._interval
        self._next = float("-inf")
        """The time at which the token of the last caller becomes available."""

    async def acquire(self) -> float:
        """Wait for a token, in order of arrival, and return the seconds waited."""
        now = asyncio.get_running_loop().time()
        # Reserve the next token at once, so that later callers queue behind this one.
        self._next = max(self._next, now - self._slack) + self._interval
        wait = self._next - now
        if wait <= 0:
            return 0.0
        await asyncio.sleep(wait)
        return wait
