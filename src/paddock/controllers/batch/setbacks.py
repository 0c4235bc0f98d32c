"""Shards whose own sandboxes fail again and again: how long each waits before the next one.

The first failure costs nothing; every further one doubles the wait. Kept in memory: after a
restart each such shard is tried once more, which does no harm.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

from msgspec import Struct

from paddock.kit.backoff import Backoff
from paddock.resources.meta import Key

_BACKOFF = Backoff(base_seconds=1.0, cap_seconds=300.0, jitter=0.0)
FORGIVEN = timedelta(seconds=2 * _BACKOFF.cap_seconds)
"""A shard that held out so long begins anew."""


class Setback(Struct, frozen=True):
    """What is remembered of one shard."""

    count: int
    at: datetime
    why: str

    @property
    def seconds(self) -> float:
        """How long it waits after this failure."""
        return _BACKOFF.delay(self.count - 1)


class Setbacks:
    """The failures of every batch's shards."""

    def __init__(self) -> None:
        self._known: dict[Key, dict[int, Setback]] = {}

    def note(self, batch: Key, shard: int, why: str, now: datetime) -> None:
        """Remember that a shard's sandbox failed."""
        shards = self._known.setdefault(batch, {})
        old = shards.get(shard)
        before = old.count if old is not None and now - old.at < FORGIVEN else 0
        shards[shard] = Setback(before + 1, now, why)

    def wait(self, batch: Key, shard: int, now: datetime) -> float:
        """Say how long a shard still waits; 0 where it may be made now."""
        known = self._known.get(batch, {}).get(shard)
        if known is None:
            return 0.0
        return max(known.seconds - (now - known.at).total_seconds(), 0.0)

    def told(self, batch: Key, ready: Collection[int]) -> str:
        """Say for people which shards fail, and why; empty where none of them does."""
        failing = {
            shard: item
            for shard, item in self._known.get(batch, {}).items()
            if item.count > 1 and shard not in ready
        }
        if not failing:
            return ""
        shard, worst = max(failing.items(), key=lambda pair: (pair[1].count, -pair[0]))
        text = f"shard {shard} failed {worst.count} times, the last time because {worst.why}"
        others = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        return f"{text}; it is made again {worst.seconds:g} s after that{others}"

    def forget(self, batch: Key) -> None:
        """Drop what is remembered of a batch."""
        self._known.pop(batch, None)
