"""What the runtime says of sandboxes unasked, and when its word makes asking needless.

Asking costs a round trip for each sandbox: for a moment after a start or a claim it is assumed
to run, because the runtime says so by itself when it does not.
"""

import asyncio
import logging
from contextlib import aclosing
from datetime import timedelta
from typing import Any, cast

from paddock.engine.informer import Informer
from paddock.engine.queue import WorkQueue
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.meta import Key
from paddock.runtime.port import Instance, InstanceState, Runtime, RuntimeEvent

log = logging.getLogger(__name__)

_FRESH = timedelta(seconds=5)
"""For so long after a start or a claim the runtime is not asked whether it runs."""


class News:
    """Follows the runtime's events."""

    def __init__(self, sandboxes: Informer[Sandbox], runtime: Runtime, clock: Clock) -> None:
        self._sandboxes = sandboxes
        self._runtime = runtime
        self._clock = clock
        self._started = clock.now()
        self._keys: dict[str, Key] = {}
        self._doubtful: set[str] = set()
        """Those of which the runtime said that something happened since it was last asked."""

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Remember which uid is which sandbox; subscribed to the Sandbox informer."""
        if new is not None:
            self._keys[new.metadata.uid] = new.key
        elif old is not None:
            self._keys.pop(old.metadata.uid, None)
            self._doubtful.discard(old.metadata.uid)

    def assumed(self, sandbox: Sandbox) -> Instance | None:
        """Give what runs for sure without asking; `None` where the runtime is to be asked."""
        uid = sandbox.metadata.uid
        if uid in self._doubtful or not self._is_fresh(sandbox):
            return None
        return Instance(
            uid=uid,
            state=InstanceState.RUNNING,
            incarnation=sandbox.status.incarnation,
            image=sandbox.status.image,
        )

    def asked(self, uid: str) -> None:
        """Forget a doubt: the runtime is about to be asked."""
        self._doubtful.discard(uid)

    def _is_fresh(self, sandbox: Sandbox) -> bool:
        """Say whether the runtime just spoke of it: it started it, or handed it over."""
        if sandbox.status.phase is not Phase.RUNNING:
            return False
        claim, started = sandbox.spec.claim, sandbox.status.started_at
        newest = max(claim.claim_time if claim else self._started, started or self._started)
        return self._started < newest > self._clock.now() - _FRESH

    async def follow(self, queue: WorkQueue[Key]) -> None:
        """Look again at every sandbox of which the runtime says that it changed unasked."""
        while True:
            try:
                stream = cast("Any", self._runtime.watch())
                async with aclosing(stream) as events:
                    async for event in events:
                        self._enqueue(queue, event)
            except PaddockError as error:
                log.warning("runtime events were cut off", extra=fields(error=error.message))
            await asyncio.sleep(1)
            # What happened while nobody listened is found by looking at everything once.
            for sandbox in self._sandboxes.all():
                self._doubtful.add(sandbox.metadata.uid)
                queue.add(sandbox.key)

    def _enqueue(self, queue: WorkQueue[Key], event: RuntimeEvent) -> None:
        if (key := self._keys.get(event.uid)) is not None:
            self._doubtful.add(event.uid)
            queue.add(key)
