"""Who is doing what to which object: the slots that wait tasks hold.

Tasks of the same action share an object; tasks of opposite actions never do. Every hold has a
lease, so that one that somebody forgot to release cannot block its object for ever.
"""

import logging
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError
from paddock.kit.logs import fields
from paddock.resources.meta import Resource

log = logging.getLogger(__name__)

LEASE_SECONDS = 900.0
"""Longer than any pause or resume may take."""


class Action(StrEnum):
    """What is being waited for."""

    PAUSE = "pause"
    RESUME = "resume"
    READY = "ready"
    CHECKPOINT = "checkpoint"
    DELETED = "deleted"


OPPOSITES: dict[Action, tuple[Action, ...]] = {
    Action.PAUSE: (Action.RESUME, Action.READY),
    Action.RESUME: (Action.PAUSE,),
    Action.READY: (Action.PAUSE,),
    Action.CHECKPOINT: (),
    Action.DELETED: (),
}

Place: TypeAlias = tuple[str, str]
"""Kind and uid: a namesake that comes later has slots of its own."""


def place_of(obj: Resource) -> Place:
    """Say where the slots of an object are."""
    return (obj.KIND, obj.metadata.uid)


class Hold(Struct, eq=False):
    """One task's part in a slot."""

    place: Place
    action: Action
    holder: str
    since: float
    expires: float


class Slots:
    """All slots of a process."""

    def __init__(self, clock: Clock, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._holds: dict[Place, dict[int, Hold]] = {}

    def __len__(self) -> int:
        """Say how many holds there are."""
        return sum(len(holds) for holds in self._holds.values())

    def acquire(self, obj: Resource, action: Action, holder: str) -> Hold:
        """Take part in the object's slot; `ConflictError` while the opposite is under way."""
        place, now = place_of(obj), self._clock.monotonic()
        holds = self._holds.get(place, {})
        for hold in tuple(holds.values()):
            if hold.action not in OPPOSITES[action]:
                continue
            if hold.expires > now:
                raise _conflict(obj, action, hold, now)
            log.warning(
                "a wait task was never released",
                extra=fields(kind=obj.KIND, key=obj.key, action=hold.action, holder=hold.holder),
            )
            self.release(hold)
        mine = Hold(place, action, holder, now, now + self._lease_seconds)
        self._holds.setdefault(place, {})[id(mine)] = mine
        return mine

    def extend(self, hold: Hold, seconds: float) -> None:
        """Let the hold outlive a wait of so many seconds."""
        until = self._clock.monotonic() + seconds + self._lease_seconds
        hold.expires = max(hold.expires, until)

    def release(self, hold: Hold) -> None:
        """Leave the slot; again is harmless."""
        holds = self._holds.get(hold.place)
        if holds is None or holds.pop(id(hold), None) is None:
            return
        if not holds:
            del self._holds[hold.place]

    def holders(self, obj: Resource) -> tuple[tuple[Action, str], ...]:
        """Say who holds what of an object."""
        holds = self._holds.get(place_of(obj), {})
        return tuple((hold.action, hold.holder) for hold in holds.values())


def _conflict(obj: Resource, action: Action, hold: Hold, now: float) -> ConflictError:
    return ConflictError(
        f"cannot {action} {obj.KIND} {obj.key}: {hold.holder} has been waiting for it to "
        f"{_WORDS[hold.action]} for {now - hold.since:.0f} s",
        hint="try again when that has ended",
    )


_WORDS = {
    Action.PAUSE: "pause",
    Action.RESUME: "resume",
    Action.READY: "become ready",
    Action.CHECKPOINT: "be stored",
    Action.DELETED: "be gone",
}
