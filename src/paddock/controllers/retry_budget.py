"""How often something that fails is tried before it is called failed.

A node that restarts, or a machine that is busy, makes attempts fail for a while: so both a number
of attempts and a length of time must have passed.
"""

from paddock.kit.clock import Clock

ATTEMPTS = 3
SECONDS = 30.0


class Patience:
    """Counts failures in a row, by uid."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}

    def is_over(self, uid: str) -> bool:
        """Count a failure; say whether that was enough."""
        count, since = self._failures.get(uid, (0, self._clock.monotonic()))
        self._failures[uid] = (count + 1, since)
        return count + 1 >= ATTEMPTS and self._clock.monotonic() - since >= SECONDS

    def forget(self, uid: str) -> None:
        """Begin anew."""
        self._failures.pop(uid, None)
