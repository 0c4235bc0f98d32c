"""Minding the wall clock: deadlines are moments of it, timers count seconds.

A clock that is set, or a machine that slept, leaves every timer wrong. Whoever notices that the
two have come apart has every sandbox with a deadline looked at again, at once.
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

LOOK_SECONDS = 5.0
TOLERATED_SECONDS = 1.0
"""Clocks that are steered drift by less than this between two looks."""


async def follow_clock(clock: Clock, sandboxes: Informer[Sandbox], queue: WorkQueue[Key]) -> None:
    """Look at the clocks now and then, until cancelled."""
    wall, steady = clock.now(), clock.monotonic()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now, counted = clock.now(), clock.monotonic()
        jumped = (now - wall).total_seconds() - (counted - steady)
        wall, steady = now, counted
        if abs(jumped) <= TOLERATED_SECONDS:
            continue
        log.warning("the wall clock jumped", extra=fields(seconds=round(jumped, 3)))
        for sandbox in sandboxes.all():
            if deadlines.next_instant(sandbox.spec) is not None:
                queue.add(sandbox.key)
