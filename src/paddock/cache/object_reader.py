"""Reading one object for a wait task: from the cache, and from the store where that is not enough.

The conditions are in `checks`, the loop and its timeouts in `waits`.
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
"""Returns what is still missing, or `None`; raises when the condition can never hold."""

_LIVE_SECONDS = 5.0

DONE_WORDS = {
    WaitAction.PAUSE: "paused",
    WaitAction.RESUME: "resumed",
    WaitAction.READY: "ready",
    WaitAction.CHECKPOINT: "stored",
    WaitAction.DELETED: "deleted",
}


class ObjectReader(Generic[R]):
    """Reads one object until a check holds."""

    def __init__(self, informer: Informer[R], live: Reader, clock: Clock, subject: R) -> None:
        self.informer = informer
        self.subject = subject
        self.missing = "it was not found in the cache"
        self._live = live
        self._clock = clock
        self._last = subject
        self._is_cached = False

    def begin(self, written: R | None) -> None:
        """Make the cache at least as new as the caller's object and its own write."""
        self.informer.observe(self.subject)
        if written is not None:
            self._last = written
            self.informer.observe(written)
        self._is_cached = self._cached() is not None

    async def check_now(self, action: WaitAction, check: Check[R]) -> R | None:
        """Return the object if the check holds, else `None`."""
        obj = self._cached()
        if obj is None and not self._is_cached:
            # Not in the cache: this process does not cache it, or it is deleted already.
            obj = await self._fetch()
        return self._judge(obj, action, check)

    async def tick(self) -> None:
        """Read the object live while the watch is broken."""
        if self._is_cached and not self.informer.is_healthy():
            try:
                async with asyncio.timeout(_LIVE_SECONDS):
                    await self._fetch()
            except Exception as error:  # noqa: BLE001 - the informer reports and retries; the next tick reads again
                log.debug("live read failed", extra=fields(key=self.subject.key, error=error))

    async def check_finally(
        self, action: WaitAction, check: Check[R], *, is_live: bool
    ) -> R | None:
        """Check once more before the wait fails."""
        if (found := self._judge(self._cached() or self._last, action, check)) is not None:
            return found
        if not is_live:
            return None
        try:
            async with asyncio.timeout(_LIVE_SECONDS):
                obj = await self._fetch()
        except Exception as error:  # noqa: BLE001 - the timeout error says more
            log.info("live read failed", extra=fields(key=self.subject.key, error=error))
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
