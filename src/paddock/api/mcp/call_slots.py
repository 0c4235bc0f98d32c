"""How many calls of one API key a process serves at once.

A call may hold megabytes of what its sandbox sends, in the process of the control plane.
"""

from collections.abc import Generator
from contextlib import contextmanager

from paddock.kit.errors import RateLimitedError

MAX_CALLS = 32


class CallSlots:
    """Counts the calls of each API key."""

    def __init__(self, limit: int = MAX_CALLS) -> None:
        self._limit = limit
        self._used: dict[str, int] = {}

    @contextmanager
    def taken(self, key_id: str) -> Generator[None]:
        """Take a slot; `RateLimitedError` if there is none."""
        used = self._used.get(key_id, 0)
        if used >= self._limit:
            raise RateLimitedError(
                f"{used} calls with this API key are under way, which is the limit",
                retry_after_seconds=1.0,
            )
        self._used[key_id] = used + 1
        try:
            yield
        finally:
            self._used[key_id] -= 1
            if not self._used[key_id]:
                del self._used[key_id]
