"""Pauses sandboxes with `spec.idlePause` when they are idle."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.checks import PAUSE_REFUSALS
from paddock.cache.provider import Provider
from paddock.controllers.idle.plan import PauseIdle, SandboxActivity, plan
from paddock.engine.recorder import Recorder
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import CONDITION_PAUSED, Sandbox
from paddock.resources.meta import condition
from paddock.resources.transitions import deadlines

log = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0
RETRY = timedelta(minutes=5)
"""Wait after a pause that failed."""
_PAUSES = metrics.counter("paddock_idle_pauses_total", "Sandboxes paused for being idle.")
Observe = Callable[[Sandbox], SandboxActivity]
"""Returns a sandbox's activity; injected by the application."""


class IdleController:
    """Pauses idle sandboxes."""

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
        """Updates what `observe` returns; called only if some sandbox has `idlePause`."""
        self._attempted: dict[str, datetime] = {}
        """Time of the last attempt for sandboxes that could not be paused, by uid."""
        self._provider = provider
        self._observe = observe
        self._clock = clock
        self._recorder = recorder

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.pause_idle()

    async def pause_idle(self) -> int:
        """Pause all idle sandboxes; return their number."""
        paused = 0
        candidates = [
            item for item in self._provider.all(Sandbox) if item.spec.idle_pause is not None
        ]
        self._attempted = {
            item.metadata.uid: self._attempted[item.metadata.uid]
            for item in candidates
            if item.metadata.uid in self._attempted
        }
        if candidates and self._refresh is not None:
            await self._refresh()
        for sandbox in candidates:
            if self._is_backing_off(sandbox):
                continue
            step = plan(sandbox, self._observe(sandbox), now=self._clock.now())
            if step is not None:
                paused += await self._pause(sandbox, step)
        return paused

    def _is_backing_off(self, sandbox: Sandbox) -> bool:
        """Whether its pause failed a while ago. Every attempt costs up to three writes."""
        found = condition(sandbox.status.conditions, CONDITION_PAUSED)
        tried = self._attempted.get(sandbox.metadata.uid)
        if found is None or found.reason not in PAUSE_REFUSALS or tried is None:
            return False
        return self._clock.now() - tried < RETRY

    async def _pause(self, sandbox: Sandbox, step: PauseIdle) -> bool:
        def changed(current: Sandbox) -> Sandbox:
            # Decide again on the newest object: a request may have arrived.
            if plan(current, self._observe(current), now=self._clock.now()) is None:
                return current
            spec = deadlines.paused(current.spec, now=self._clock.now())
            return structs.replace(current, spec=spec)

        try:
            written = await self._provider.write.mutate(
                Sandbox, sandbox.key, changed, uid=sandbox.metadata.uid
            )
        except PaddockError as error:
            log.info("cannot pause idle sandbox", extra=fields(sandbox=sandbox.key, error=error))
            return False
        if not written.spec.paused:
            return False
        self._attempted[sandbox.metadata.uid] = self._clock.now()
        _PAUSES.inc()
        self._recorder.normal(sandbox, "IdlePaused", f"idle for {step.idle_seconds} s")
        return True
