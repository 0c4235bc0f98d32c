"""Helpers for pidfds: check for exit, wait for exit, kill."""

import asyncio
import contextlib
import os
import select
import signal

_TIMEOUT_SECONDS = 20.0


def has_ended(pidfd: int) -> bool:
    """Whether a process has exited, reaped or not."""
    watch = select.poll()
    watch.register(pidfd, select.POLLIN)
    return bool(watch.poll(0))


async def wait_for_exit(pidfd: int, *, seconds: float = _TIMEOUT_SECONDS) -> None:
    """Wait until a process has exited."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: None if ended.done() else ended.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await ended
    finally:
        loop.remove_reader(pidfd)


def kill(pidfd: int, *, close: bool = True) -> None:
    """Kill a process, if it still runs, and close the pidfd."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if close:
        os.close(pidfd)
