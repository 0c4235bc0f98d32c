"""Enqueues sandboxes on runtime events, records them, and skips needless inspections.

An inspection costs one round trip per sandbox. For a short time after a start or a claim the
instance is assumed to run, because the runtime reports by an event if it does not.
"""

import asyncio
import logging
from contextlib import aclosing
from datetime import timedelta
from typing import Any, cast

from paddock.engine.informer import Informer
from paddock.engine.queue import WorkQueue
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.meta import Key
from paddock.runtime.port import Instance, InstanceState, Runtime, RuntimeEvent

log = logging.getLogger(__name__)

REASON_OUT_OF_MEMORY = "OutOfMemory"
_FRESH = timedelta(seconds=5)
"""After a start or a claim the instance is not inspected for this long."""


class RuntimeEvents:
    """Watches the runtime's events."""

    def __init__(
        self, sandboxes: Informer[Sandbox], runtime: Runtime, clock: Clock, recorder: Recorder
    ) -> None:
        self._sandboxes = sandboxes
        self._runtime = runtime
        self._clock = clock
        self._recorder = recorder
        self._started = clock.now()
        self._keys: dict[str, Key] = {}
        self._stale: set[str] = set()
        """Uids with an event since their last inspection."""

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Update the index of uids; subscribed to the Sandbox informer."""
        if new is not None:
            self._keys[new.metadata.uid] = new.key
        elif old is not None:
            self._keys.pop(old.metadata.uid, None)
            self._stale.discard(old.metadata.uid)

    def assumed_instance(self, sandbox: Sandbox) -> Instance | None:
        """Return the instance that surely runs, or `None` if it must be inspected."""
        uid = sandbox.metadata.uid
        if uid in self._stale or not self._is_fresh(sandbox):
            return None
        return Instance(
            uid=uid,
            state=InstanceState.RUNNING,
            incarnation=sandbox.status.incarnation,
            image=sandbox.status.image,
        )

    def mark_inspected(self, uid: str) -> None:
        """Clear a uid's event mark, just before its inspection."""
        self._stale.discard(uid)

    def _is_fresh(self, sandbox: Sandbox) -> bool:
        """Whether the runtime started or handed over the instance a moment ago."""
        if sandbox.status.phase is not Phase.RUNNING:
            return False
        claim, started = sandbox.spec.claim, sandbox.status.started_at
        newest = max(claim.claim_time if claim else self._started, started or self._started)
        return self._started < newest > self._clock.now() - _FRESH

    async def run(self, queue: WorkQueue[Key]) -> None:
        """Enqueue every sandbox that the runtime reports as changed."""
        while True:
            try:
                stream = cast("Any", self._runtime.watch())
                async with aclosing(stream) as events:
                    async for event in events:
                        self._enqueue(queue, event)
            except PaddockError as error:
                log.warning("watch of runtime events ended", extra=fields(error=error.message))
            await asyncio.sleep(1)
            # Events in between were missed: enqueue all sandboxes once.
            for sandbox in self._sandboxes.all():
                self._stale.add(sandbox.metadata.uid)
                queue.add(sandbox.key)

    def _enqueue(self, queue: WorkQueue[Key], event: RuntimeEvent) -> None:
        if (key := self._keys.get(event.uid)) is not None:
            self._stale.add(event.uid)
            queue.add(key)
            if event.memory_kills and (sandbox := self._sandboxes.get(key)) is not None:
                self._recorder.warning(sandbox, REASON_OUT_OF_MEMORY, event.reason or "")
