"""Detects jumps of the wall clock: deadlines are wall-clock times, timers count seconds.

A clock that was set, or a machine that slept, makes every timer wrong. When wall clock and
monotonic clock diverge, all sandboxes with a deadline are enqueued at once.
"""

import asyncio
import logging

from paddock.engine.informer import Informer
from paddock.engine.queue import WorkQueue
from paddock.kit.clock import Clock
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key
from paddock.resources.transitions import deadlines

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
TOLERATED_SECONDS = 1.0
"""NTP slewing drifts by less than this between two checks."""


async def watch_clock(clock: Clock, sandboxes: Informer[Sandbox], queue: WorkQueue[Key]) -> None:
    """Compare the clocks periodically until cancelled."""
    wall, steady = clock.now(), clock.monotonic()
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        now, counted = clock.now(), clock.monotonic()
        jumped = (now - wall).total_seconds() - (counted - steady)
        wall, steady = now, counted
        if abs(jumped) <= TOLERATED_SECONDS:
            continue
        log.warning("the wall clock jumped", extra=fields(seconds=round(jumped, 3)))
        for sandbox in sandboxes.all():
            if deadlines.next_instant(sandbox.spec) is not None:
                queue.add(sandbox.key)
