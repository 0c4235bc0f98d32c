"""The running time of a task: pauses of its sandbox do not count towards a timeout."""

import asyncio
from datetime import datetime
from typing import Any

from paddock.envd.tasks.model import TaskRecord
from paddock.envd.tasks.task_launcher import RunningTask

SPANS, SPAN_SECONDS = 20, 1.0
"""The running time of a task is counted in this many spans of at least this many seconds."""


def seconds_left(record: TaskRecord, limit: float, now: datetime) -> float:
    """Return the seconds left to a task; the full timeout if it passed during a pause."""
    if record.started_at is None:
        return limit
    left = limit - (now - record.started_at).total_seconds()
    return left if 0 < left <= limit else limit


async def wait_running(
    seconds: float, limit: float, running: RunningTask, ends: "set[asyncio.Future[Any]]"
) -> None:
    """Wait until one of `ends` is done, or the command has run for `seconds`.

    Pauses do not count: after every span the command must respond before the next one begins.
    """
    while seconds > 0:
        span = min(seconds, max(limit / SPANS, SPAN_SECONDS))
        done, _ = await asyncio.wait(ends, timeout=span, return_when="FIRST_COMPLETED")
        if done:
            return
        responsive = asyncio.ensure_future(running.wait_responsive())
        try:
            done, _ = await asyncio.wait({*ends, responsive}, return_when="FIRST_COMPLETED")
            if done & ends:
                return
            responsive.result()
        finally:
            responsive.cancel()
        seconds -= span
