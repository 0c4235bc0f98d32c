"""Memory of what a process removed itself, until the watch has caught up.

Without it, an event that was under way when the object was deleted would bring it back.
"""

from msgspec import Struct

from paddock.kit.clock import Clock
from paddock.resources.meta import Key

_KEEP_SECONDS = 600.0
"""Longer than a watch lags; the deletion event usually clears it far sooner."""


class _Tombstone(Struct, frozen=True):
    uid: str
    """The uid of the deleted object; empty where it only left the selection."""
    up_to: int
    """Versions at this key up to this one are stale."""
    at: float


class Tombstones:
    """Keys whose objects were removed."""

    def __init__(self, clock: Clock, *, keep_seconds: float = _KEEP_SECONDS) -> None:
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._entries: dict[Key, _Tombstone] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Key, *, uid: str, up_to: int) -> None:
        """Mark objects at this key as stale: of this uid, or not newer than `up_to`."""
        now = self._clock.monotonic()
        self.forget_before(now - self._keep_seconds)
        known = self._entries.pop(key, None)
        if known is not None and known.up_to > up_to:
            uid, up_to = known.uid, known.up_to
        # Popped and set again, so that the order of the dict is the order of time.
        self._entries[key] = _Tombstone(uid, up_to, now)

    def covers(self, key: Key, *, uid: str, version: int) -> bool:
        """Whether an object at this key is stale."""
        if not self._entries:
            return False
        known = self._entries.get(key)
        return known is not None and (version <= known.up_to or uid == known.uid)

    def forget(self, key: Key, *, uid: str, version: int) -> None:
        """Clear the tombstone of a deletion that the watch has delivered."""
        known = self._entries.get(key)
        if known is not None and (uid == known.uid or version >= known.up_to):
            del self._entries[key]

    def forget_before(self, moment: float) -> None:
        """Clear tombstones from before a moment: a list that began then is complete."""
        while self._entries:
            key, known = next(iter(self._entries.items()))
            if known.at >= moment:
                return
            del self._entries[key]
