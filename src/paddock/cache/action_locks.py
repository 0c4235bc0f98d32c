"""Locks by object and action, held by wait tasks.

Tasks of the same action share an object; opposite actions exclude each other. Every lock has a
lease, so that one that is never released does not block its object for ever.
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
    """The change that a task waits for."""

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
"""Kind and uid: an object recreated under the same name has locks of its own."""


def lock_key(obj: Resource) -> LockKey:
    """Return the key of an object's locks."""
    return (obj.KIND, obj.metadata.uid)


class ActionLock(Struct, eq=False):
    """One task's lock on an object."""

    key: LockKey
    action: WaitAction
    holder: str
    since: float
    expires: float


class ActionLocks:
    """All action locks of a process."""

    def __init__(self, clock: Clock, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._locks: dict[LockKey, dict[int, ActionLock]] = {}

    def __len__(self) -> int:
        """Return the number of locks."""
        return sum(len(locks) for locks in self._locks.values())

    def acquire(self, obj: Resource, action: WaitAction, holder: str) -> ActionLock:
        """Lock the object for an action; `ConflictError` while an opposite action is in flight."""
        key, now = lock_key(obj), self._clock.monotonic()
        locks = self._locks.get(key, {})
        for lock in tuple(locks.values()):
            if lock.action not in OPPOSITES[action]:
                continue
            if lock.expires > now:
                raise _conflict(obj, action, lock, now)
            log.warning(
                "action lock expired without release",
                extra=fields(kind=obj.KIND, key=obj.key, action=lock.action, holder=lock.holder),
            )
            self.release(lock)
        mine = ActionLock(key, action, holder, now, now + self._lease_seconds)
        self._locks.setdefault(key, {})[id(mine)] = mine
        return mine

    def extend(self, lock: ActionLock, seconds: float) -> None:
        """Extend the lease beyond a wait of so many seconds."""
        until = self._clock.monotonic() + seconds + self._lease_seconds
        lock.expires = max(lock.expires, until)

    def release(self, lock: ActionLock) -> None:
        """Release the lock; idempotent."""
        locks = self._locks.get(lock.key)
        if locks is None or locks.pop(id(lock), None) is None:
            return
        if not locks:
            del self._locks[lock.key]

    def holders(self, obj: Resource) -> tuple[tuple[WaitAction, str], ...]:
        """Return the actions and holders of an object's locks."""
        locks = self._locks.get(lock_key(obj), {})
        return tuple((lock.action, lock.holder) for lock in locks.values())


def _conflict(obj: Resource, action: WaitAction, lock: ActionLock, now: float) -> ConflictError:
    return ConflictError(
        f"cannot {action} {obj.KIND} {obj.key}: {lock.holder} has been waiting for it to "
        f"{_WORDS[lock.action]} for {now - lock.since:.0f} s",
        hint="retry when it has finished",
    )


_WORDS = {
    WaitAction.PAUSE: "pause",
    WaitAction.RESUME: "resume",
    WaitAction.READY: "become ready",
    WaitAction.CHECKPOINT: "be stored",
    WaitAction.DELETED: "be deleted",
}
