"""Rates of API calls, by API key and by client address.

Each has a token bucket: some calls at once, then so many per second. A call that finds its bucket
empty is refused with 429 and the time to wait, before anything is read or changed. State is in
memory, per process, and bounded.
"""

import logging
from collections import OrderedDict

from msgspec import Struct

from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

MAX_BUCKETS = 10_000
"""Keys, and addresses, that are remembered. The one that called longest ago is forgotten first."""
BURST_SECONDS = 10
"""A bucket holds the calls of so many seconds."""


class _Bucket(Struct):
    left: float
    counted_at: float
    is_reported: bool = False


class _Buckets:
    """One bucket for each caller of a kind."""

    def __init__(self, what: str, per_second: float) -> None:
        self._what = what
        self._rate = per_second
        self._size = per_second * BURST_SECONDS
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, caller: str, now: float) -> None:
        """Count one call; `RateLimitedError` if there were too many."""
        if not self._rate:
            return
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = _Bucket(self._size, now)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(caller)
            left = bucket.left + (now - bucket.counted_at) * self._rate
            bucket.left, bucket.counted_at = min(left, self._size), now
        if bucket.left >= 1:
            bucket.left -= 1
            if bucket.is_reported and bucket.left > self._size / 2:
                bucket.is_reported = False
            return
        if not bucket.is_reported:
            bucket.is_reported = True
            log.warning("API calls are limited", extra=fields(**{self._what: caller}))
        raise RateLimitedError(
            f"too many calls by this {self._what}: at most {self._rate:g} per second",
            retry_after_seconds=max((1 - bucket.left) / self._rate, 1.0),
            hint="send fewer calls at once, or ask an operator to raise the limit",
        )


class CallLimits:
    """Limits the calls of each API key and of each client address."""

    def __init__(self, clock: Clock, *, per_key: float = 0.0, per_address: float = 0.0) -> None:
        """Calls per second; 0: no limit."""
        self._now = clock.monotonic
        self._keys = _Buckets("key", per_key)
        self._addresses = _Buckets("address", per_address)

    def take(self, address: str | None, key_id: str) -> None:
        """Count one call; `RateLimitedError` if there were too many.

        The address is `None` for a process of this machine; see `login_limits.limited_address`.
        """
        now = self._now()
        if address is not None:
            self._addresses.take(address, now)
        self._keys.take(key_id, now)
