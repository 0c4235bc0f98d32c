"""Repeated refusals as one line per minute and sender, so that a flood cannot fill the log. Pure.

The first refusal of a minute is written at once. Those that follow are counted, and the count is
written when the minute is over. Memory and lines are bounded: beyond `MAX_SENDERS` in a minute,
further senders share one count.
"""

from typing import NamedTuple

from msgspec import Struct

from paddock.api.audit.event import AuditEvent

WINDOW_SECONDS = 60.0
MAX_SENDERS = 100


class RefusalKey(NamedTuple):
    """What makes two refusals the same."""

    sender: str
    """A network, or the id of a key. Empty: many senders."""
    code: int
    what: str


class Repeated(Struct):
    """The first of several refusals, and how many followed."""

    first: AuditEvent
    more: int = 0
    is_shared: bool = False
    """Whether the refusals have many senders."""


class RefusalCounter:
    """Counts refusals by sender, a minute at a time."""

    def __init__(self) -> None:
        self._seen: dict[RefusalKey, Repeated] = {}
        self._ends_at = 0.0

    def is_first(self, key: RefusalKey, event: AuditEvent, now: float) -> bool:
        """Whether to write this refusal; if not, it is counted."""
        if not self._seen:
            self._ends_at = now + WINDOW_SECONDS
        seen = self._seen.get(key)
        is_shared = seen is None and len(self._seen) >= MAX_SENDERS
        if is_shared:
            key = RefusalKey("", key.code, "")
            seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = Repeated(event, is_shared=is_shared)
            return True
        seen.more += 1
        return False

    def take_ended(self, now: float) -> list[Repeated]:
        """Return what repeated in the last minute if it is over, else nothing."""
        if not self._seen or now < self._ends_at:
            return []
        return self.take_all()

    def take_all(self) -> list[Repeated]:
        """Return what repeated so far, and start a new minute."""
        ended = [item for item in self._seen.values() if item.more]
        self._seen = {}
        return ended
