"""Looks after sandboxes that want to be paused when nothing happens in them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.checks import PAUSE_REFUSALS
from paddock.cache.provider import Provider
from paddock.controllers.idle.plan import Pause, Seen, plan
from paddock.engine.recorder import Recorder
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import CONDITION_PAUSED, Sandbox
from paddock.resources.meta import condition
from paddock.resources.transitions import deadlines

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
RETRY = timedelta(minutes=5)
"""How long one that could not be paused is left alone."""
_PAUSES = metrics.counter("paddock_idle_pauses_total", "Sandboxes paused for being idle.")
Observe = Callable[[Sandbox], Seen]
"""Gives what is known of a sandbox's doings; handed in by the application."""


class IdleController:
    """Pauses the idle."""

    def __init__(
        self,
        provider: Provider,
        observe: Observe,
        clock: Clock,
        recorder: Recorder,
        *,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._refresh = refresh
        """Finds out what `observe` shows; only called where somebody wants to be paused."""
        self._tried: dict[str, datetime] = {}
        """When it was last asked for the pause of those that could not be paused."""
        self._provider = provider
        self._observe = observe
        self._clock = clock
        self._recorder = recorder

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> int:
        """Pause whatever is idle; says how many that were."""
        paused = 0
        wanting = [item for item in self._provider.all(Sandbox) if item.spec.idle_pause is not None]
        self._tried = {
            item.metadata.uid: self._tried[item.metadata.uid]
            for item in wanting
            if item.metadata.uid in self._tried
        }
        if wanting and self._refresh is not None:
            await self._refresh()
        for sandbox in wanting:
            if self._is_refused(sandbox):
                continue
            step = plan(sandbox, self._observe(sandbox), now=self._clock.now())
            if step is not None:
                paused += await self._pause(sandbox, step)
        return paused

    def _is_refused(self, sandbox: Sandbox) -> bool:
        """Say whether it could not be paused a while ago: every try is a write or three."""
        found = condition(sandbox.status.conditions, CONDITION_PAUSED)
        tried = self._tried.get(sandbox.metadata.uid)
        if found is None or found.reason not in PAUSE_REFUSALS or tried is None:
            return False
        return self._clock.now() - tried < RETRY

    async def _pause(self, sandbox: Sandbox, step: Pause) -> bool:
        def changed(current: Sandbox) -> Sandbox:
            # Decided anew on what is there now: a request may have come meanwhile.
            if plan(current, self._observe(current), now=self._clock.now()) is None:
                return current
            spec = deadlines.paused(current.spec, now=self._clock.now())
            return structs.replace(current, spec=spec)

        try:
            written = await self._provider.write.mutate(
                Sandbox, sandbox.key, changed, uid=sandbox.metadata.uid
            )
        except PaddockError as error:
            log.info("idle sandbox was not paused", extra=fields(sandbox=sandbox.key, error=error))
            return False
        if not written.spec.paused:
            return False
        self._tried[sandbox.metadata.uid] = self._clock.now()
        _PAUSES.inc()
        self._recorder.normal(sandbox, "IdlePaused", f"nothing happened for {step.idle_seconds} s")
        return True
