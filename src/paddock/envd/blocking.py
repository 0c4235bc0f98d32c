"""Blocking work in threads.

A cancelled caller still waits for its thread: descriptors in use must not be closed meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures.thread import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_pool: list[ThreadPoolExecutor] = []


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a thread."""
    if not _pool:
        _pool.append(ThreadPoolExecutor(max_workers=4, thread_name_prefix="files"))
    future = asyncio.wrap_future(_pool[0].submit(work, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # mark it as retrieved
        raise


def stop_threads() -> None:
    """Stop all threads; the next call starts new ones. Required before a fork."""
    while _pool:
        _pool.pop().shutdown(wait=True)
