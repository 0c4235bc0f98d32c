"""Exponential backoff with jitter, up to a cap."""

import random

from msgspec import Struct


class Backoff(Struct, frozen=True, kw_only=True):
    """A schedule of delays. Holds no state: the caller counts the attempts."""

    base_seconds: float = 0.05
    cap_seconds: float = 30.0
    jitter: float = 0.2
    """Up to this share is added at random, so that many callers do not retry at once."""

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after this many failures; 0 after none."""
        if failures <= 0:
            return 0.0
        # The exponent is bounded: weeks of failures must not overflow a float.
        seconds = min(self.base_seconds * 2.0 ** min(failures - 1, 60), self.cap_seconds)
        return seconds * (1.0 + self.jitter * random.random())  # noqa: S311 - guards nothing
