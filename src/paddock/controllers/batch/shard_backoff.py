"""Shards whose own sandboxes fail again and again: how long each waits before the next one.

The first failure costs nothing; every further one doubles the wait. Whoever changes the batch
gets another try at once. Kept in memory: after a restart each such shard is tried once more, which
does no harm.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

from msgspec import Struct

from paddock.kit.backoff import Backoff
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.meta import Key

_BACKOFF = Backoff(base_seconds=1.0, cap_seconds=300.0, jitter=0.0)
FORGIVEN = timedelta(seconds=2 * _BACKOFF.cap_seconds)
"""A shard that held out so long begins anew."""


class Setback(Struct, frozen=True):
    """What is remembered of one shard."""

    generation: int
    """Of the batch, when it failed."""
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

    def note(self, batch: BatchSandbox, shard: int, why: str, now: datetime) -> None:
        """Remember that a shard's sandbox failed."""
        old = self._of(batch, shard)
        before = old.count if old is not None and now - old.at < FORGIVEN else 0
        new = Setback(batch.metadata.generation, before + 1, now, why)
        self._known.setdefault(batch.key, {})[shard] = new

    def wait(self, batch: BatchSandbox, shard: int, now: datetime) -> float:
        """Say how long a shard still waits; 0 where it may be made now."""
        known = self._of(batch, shard)
        if known is None:
            return 0.0
        return max(known.seconds - (now - known.at).total_seconds(), 0.0)

    def told(self, batch: BatchSandbox, ready: Collection[int]) -> str:
        """Say for people which shards fail, and why; empty where none of them does."""
        failing = {
            shard: item
            for shard in self._known.get(batch.key, ())
            if shard not in ready and (item := self._of(batch, shard)) and item.count > 1
        }
        if not failing:
            return ""
        shard, worst = max(failing.items(), key=lambda pair: (pair[1].count, -pair[0]))
        text = f"shard {shard} failed {worst.count} times, the last time because {worst.why}"
        others = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        return f"{text}; it is made again {worst.seconds:g} s after that{others}"

    def _of(self, batch: BatchSandbox, shard: int) -> Setback | None:
        """Give what counts of a shard's past: none of it where the batch was changed since."""
        known = self._known.get(batch.key, {}).get(shard)
        return known if known and known.generation == batch.metadata.generation else None

    def forget(self, batch: Key) -> None:
        """Drop what is remembered of a batch."""
        self._known.pop(batch, None)
