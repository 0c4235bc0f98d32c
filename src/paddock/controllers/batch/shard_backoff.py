"""Backoff of template shards whose sandboxes fail repeatedly.

The first failure is retried at once; every further one doubles the wait. A changed batch is retried
at once. The state is in memory only: after a restart each shard is retried once more, which is
harmless.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

from msgspec import Struct

from paddock.kit.backoff import Backoff
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.meta import Key

_BACKOFF = Backoff(base_seconds=1.0, cap_seconds=300.0, jitter=0.0)
RESET_AFTER = timedelta(seconds=2 * _BACKOFF.cap_seconds)
"""After this time without a failure the count starts again."""


class ShardFailure(Struct, frozen=True):
    """The latest failure of one shard."""

    generation: int
    """Generation of the batch at that time."""
    count: int
    at: datetime
    why: str

    @property
    def seconds(self) -> float:
        """The wait after this failure."""
        return _BACKOFF.delay(self.count - 1)


class ShardBackoff:
    """Failures of all batches' shards."""

    def __init__(self) -> None:
        self._known: dict[Key, dict[int, ShardFailure]] = {}

    def record(self, batch: BatchSandbox, shard: int, why: str, now: datetime) -> None:
        """Record that a shard's sandbox failed."""
        old = self._of(batch, shard)
        before = old.count if old is not None and now - old.at < RESET_AFTER else 0
        new = ShardFailure(batch.metadata.generation, before + 1, now, why)
        self._known.setdefault(batch.key, {})[shard] = new

    def wait(self, batch: BatchSandbox, shard: int, now: datetime) -> float:
        """Return the remaining wait of a shard in seconds; 0 if it is due."""
        known = self._of(batch, shard)
        if known is None:
            return 0.0
        return max(known.seconds - (now - known.at).total_seconds(), 0.0)

    def message(self, batch: BatchSandbox, ready: Collection[int]) -> str:
        """Return a message about failing shards; empty if none fails repeatedly."""
        failing = {
            shard: item
            for shard in self._known.get(batch.key, ())
            if shard not in ready and (item := self._of(batch, shard)) and item.count > 1
        }
        if not failing:
            return ""
        shard, worst = max(failing.items(), key=lambda pair: (pair[1].count, -pair[0]))
        text = f"shard {shard} failed {worst.count} times; last error: {worst.why}"
        others = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        return f"{text}; backoff {worst.seconds:g} s{others}"

    def _of(self, batch: BatchSandbox, shard: int) -> ShardFailure | None:
        """Return a shard's failure unless the batch was changed since."""
        known = self._known.get(batch.key, {}).get(shard)
        return known if known and known.generation == batch.metadata.generation else None

    def forget(self, batch: Key) -> None:
        """Forget all failures of a batch."""
        self._known.pop(batch, None)
