"""How often a failing operation is retried before the object is reported as failed.

A node that restarts or a busy machine makes attempts fail for a while. Therefore the budget is
spent only after both a number of attempts and a length of time.
"""

from paddock.kit.clock import Clock

ATTEMPTS = 3
SECONDS = 30.0


class RetryBudget:
    """Counts consecutive failures, by uid."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}

    def is_spent(self, uid: str) -> bool:
        """Count a failure and return whether the budget is spent."""
        count, since = self._failures.get(uid, (0, self._clock.monotonic()))
        self._failures[uid] = (count + 1, since)
        return count + 1 >= ATTEMPTS and self._clock.monotonic() - since >= SECONDS

    def reset(self, uid: str) -> None:
        """Forget the failures of one uid."""
        self._failures.pop(uid, None)
