"""Looking at one object for a wait task: in the cache, and where that is not enough, live.

What is waited for is the check's business, how long `waits`'.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Generic, TypeAlias

from paddock.cache.action_locks import WaitAction
from paddock.engine.informer import Informer
from paddock.engine.reader import Reader
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError
from paddock.kit.logs import fields
from paddock.resources.meta import R

log = logging.getLogger(__name__)

Check: TypeAlias = Callable[[R, datetime], str | None]
"""Gives what is still missing, or `None`; raises what makes waiting pointless."""

_LIVE_SECONDS = 5.0

DONE_WORDS = {
    WaitAction.PAUSE: "paused",
    WaitAction.RESUME: "resumed",
    WaitAction.READY: "ready",
    WaitAction.CHECKPOINT: "stored",
    WaitAction.DELETED: "gone",
}


class Observer(Generic[R]):
    """Looks at one object."""

    def __init__(self, informer: Informer[R], live: Reader, clock: Clock, subject: R) -> None:
        self.informer = informer
        self.subject = subject
        self.missing = "nothing was seen of it"
        self._live = live
        self._clock = clock
        self._last = subject
        self._is_cached = False

    def begin(self, written: R | None) -> None:
        """Make the cache at least as new as what the caller has in hand."""
        self.informer.observe(self.subject)
        if written is not None:
            self._last = written
            self.informer.observe(written)
        self._is_cached = self._cached() is not None

    async def look(self, action: WaitAction, check: Check[R]) -> R | None:
        """Give the object if it satisfies the check."""
        obj = self._cached()
        if obj is None and not self._is_cached:
            # Never seen here: outside what this process caches, or deleted before we came.
            obj = await self._fetch()
        return self._judge(obj, action, check)

    async def tick(self) -> None:
        """Make up for a watch that is broken."""
        if self._is_cached and not self.informer.is_healthy():
            try:
                async with asyncio.timeout(_LIVE_SECONDS):
                    await self._fetch()
            except Exception as error:  # noqa: BLE001 - the informer reports and retries; we tick
                log.debug("live look failed", extra=fields(key=self.subject.key, error=error))

    async def last_look(self, action: WaitAction, check: Check[R], *, is_live: bool) -> R | None:
        """Look once more before giving up."""
        if (found := self._judge(self._cached() or self._last, action, check)) is not None:
            return found
        if not is_live:
            return None
        try:
            async with asyncio.timeout(_LIVE_SECONDS):
                obj = await self._fetch()
        except Exception as error:  # noqa: BLE001 - what is missing is the better answer
            log.info("live look failed", extra=fields(key=self.subject.key, error=error))
            return None
        return self._judge(obj, action, check)

    def _cached(self) -> R | None:
        obj = self.informer.get(self.subject.key)
        if obj is None or obj.metadata.uid != self.subject.metadata.uid:
            return None
        self._is_cached = True
        return obj

    async def _fetch(self) -> R | None:
        try:
            obj = await self._live.get(type(self.subject), self.subject.key)
        except NotFoundError:
            return None
        if obj.metadata.uid != self.subject.metadata.uid:
            return None
        self.informer.observe(obj)
        return obj

    def _judge(self, obj: R | None, action: WaitAction, check: Check[R]) -> R | None:
        if obj is None:
            if action is WaitAction.DELETED:
                return self._last
            raise NotFoundError(
                f"{self.subject.KIND} {self.subject.key} was deleted before it was "
                f"{DONE_WORDS[action]}"
            )
        self._last = obj
        missing = check(obj, self._clock.now())
        if missing is None:
            return obj
        self.missing = missing
        return None
