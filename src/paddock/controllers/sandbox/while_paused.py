"""Runs a slow call of the runtime only as long as its sandbox is to stay paused."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from paddock.kit.tasks import cancel_and_wait
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

T = TypeVar("T")


class WhilePaused:
    """Cancels calls for sandboxes that are resumed or deleted meanwhile."""

    def __init__(self, find: Callable[[Key], Sandbox | None]) -> None:
        self._find = find
        self._ended: dict[str, asyncio.Event] = {}
        """One per call, by the uid of the sandbox; a reconcile makes one call at a time."""

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Must be subscribed to the Sandbox informer."""
        if (seen := new or old) is None:
            return
        ended = self._ended.get(seen.metadata.uid)
        if ended is not None and not _stays_paused(new, seen.metadata.uid):
            ended.set()

    async def run(self, sandbox: Sandbox, call: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the call, or `None` if it was cancelled."""
        uid = sandbox.metadata.uid
        ended = self._ended[uid] = asyncio.Event()
        if not _stays_paused(self._find(sandbox.key), uid):
            ended.set()
        calling = asyncio.ensure_future(call)
        ending = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait((calling, ending), return_when=asyncio.FIRST_COMPLETED)
            return calling.result() if calling.done() else None
        finally:
            del self._ended[uid]
            await cancel_and_wait(*(task for task in (calling, ending) if not task.done()))


def _stays_paused(sandbox: Sandbox | None, uid: str) -> bool:
    if sandbox is None or sandbox.metadata.uid != uid:
        return False
    return sandbox.spec.paused and not sandbox.is_deleting
