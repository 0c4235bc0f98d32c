"""How long to wait before trying again: exponentially longer, with jitter, up to a cap."""

import random

from msgspec import Struct


class Backoff(Struct, frozen=True, kw_only=True):
    """A schedule of delays. Holds no state: the caller counts the attempts."""

    base_seconds: float = 0.05
    factor: float = 2.0
    cap_seconds: float = 30.0
    jitter: float = 0.2
    """Up to this share is added at random, so that many do not try again at once."""

    def delay(self, attempt: int) -> float:
        """Give the seconds to wait after failure number `attempt`, counted from 1."""
        # The exponent is bounded: a key that fails for weeks must not overflow a float.
        seconds = self.base_seconds * self.factor ** min(max(attempt - 1, 0), 60)
        spread = 1.0 + self.jitter * random.random()  # noqa: S311 - spreads load, guards nothing
        return min(seconds, self.cap_seconds) * spread
