"""Helpers for asyncio tasks: cancel and wait, background work."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

log = logging.getLogger(__name__)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until each has ended; their errors are logged."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
        except Exception:
            log.exception("task ended with an error while being stopped")


def cancel_count() -> int:
    """Return the number of pending cancellation requests of the current task."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def clear_cancellation(before: int) -> None:
    """Undo the cancellation by which a TaskGroup stopped its own parent.

    When the last of its tasks fails, Python 3.11 leaves the parent marked as cancelled;
    code that continues after the failure must not be.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > before:
        task.uncancel()


@contextlib.asynccontextmanager
async def background(
    work: Coroutine[Any, Any, Any], *, name: str
) -> AsyncGenerator[asyncio.Task[Any]]:
    """Run work concurrently with the body; cancel it and wait for its end when the body ends."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        yield task
    except BaseException as error:
        if task.done() and not task.cancelled() and task.exception() is error:
            raise  # The body re-raised the work's own error: do not log it again.
        await cancel_and_wait(task)
        raise
    else:
        await cancel_and_wait(task)
