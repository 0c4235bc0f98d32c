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


class WaitAction(StrEnum):
    """What is being waited for."""

    PAUSE = "pause"
    RESUME = "resume"
    READY = "ready"
    CHECKPOINT = "checkpoint"
    DELETED = "deleted"


OPPOSITES: dict[WaitAction, tuple[WaitAction, ...]] = {
    WaitAction.PAUSE: (WaitAction.RESUME, WaitAction.READY),
    WaitAction.RESUME: (WaitAction.PAUSE,),
    WaitAction.READY: (WaitAction.PAUSE,),
    WaitAction.CHECKPOINT: (),
    WaitAction.DELETED: (),
}

LockKey: TypeAlias = tuple[str, str]
"""Kind and uid: a namesake that comes later has slots of its own."""


def lock_key(obj: Resource) -> LockKey:
    """Say where the slots of an object are."""
    return (obj.KIND, obj.metadata.uid)


class ActionLock(Struct, eq=False):
    """One task's part in a slot."""

    place: LockKey
    action: WaitAction
    holder: str
    since: float
    expires: float


class ActionLocks:
    """All slots of a process."""

    def __init__(self, clock: Clock, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._holds: dict[LockKey, dict[int, ActionLock]] = {}

    def __len__(self) -> int:
        """Say how many holds there are."""
        return sum(len(holds) for holds in self._holds.values())

    def acquire(self, obj: Resource, action: WaitAction, holder: str) -> ActionLock:
        """Take part in the object's slot; `ConflictError` while the opposite is under way."""
        place, now = lock_key(obj), self._clock.monotonic()
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
        mine = ActionLock(place, action, holder, now, now + self._lease_seconds)
        self._holds.setdefault(place, {})[id(mine)] = mine
        return mine

    def extend(self, hold: ActionLock, seconds: float) -> None:
        """Let the hold outlive a wait of so many seconds."""
        until = self._clock.monotonic() + seconds + self._lease_seconds
        hold.expires = max(hold.expires, until)

    def release(self, hold: ActionLock) -> None:
        """Leave the slot; again is harmless."""
        holds = self._holds.get(hold.place)
        if holds is None or holds.pop(id(hold), None) is None:
            return
        if not holds:
            del self._holds[hold.place]

    def holders(self, obj: Resource) -> tuple[tuple[WaitAction, str], ...]:
        """Say who holds what of an object."""
        holds = self._holds.get(lock_key(obj), {})
        return tuple((hold.action, hold.holder) for hold in holds.values())


def _conflict(obj: Resource, action: WaitAction, hold: ActionLock, now: float) -> ConflictError:
    return ConflictError(
        f"cannot {action} {obj.KIND} {obj.key}: {hold.holder} has been waiting for it to "
        f"{_WORDS[hold.action]} for {now - hold.since:.0f} s",
        hint="try again when that has ended",
    )


_WORDS = {
    WaitAction.PAUSE: "pause",
    WaitAction.RESUME: "resume",
    WaitAction.READY: "become ready",
    WaitAction.CHECKPOINT: "be stored",
    WaitAction.DELETED: "be gone",
}
