"""Ending what a failed claim left, or may have left, in the store.

The client was told that it has nothing, so nothing may stay claimed in its name: not what could
not be handed over, and not what a write without an answer may have made. It is tried until it
is known to be gone, in a task of its own; its quota stays taken as long.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.lost_replies import find_written
from paddock.claims.quota.ledger import Ledger
from paddock.kit.backoff import Backoff
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.kit.tasks import cancel_and_wait
from paddock.resources.kinds.sandbox import Sandbox

log = logging.getLogger(__name__)

_BACKOFF = Backoff(base_seconds=0.1, cap_seconds=10.0)
_LOOKS = 2
"""Nothing was written when so many looks, a moment apart, say so: a request that was given up
may still be on its way to the store."""
_BETWEEN_LOOKS = 1.0


class ClaimCleanup:
    """Follows each failed claim to its end."""

    def __init__(self, provider: Provider, ledger: Ledger, pool_members: PoolMembers) -> None:
        self._provider = provider
        self._pool_members = pool_members
        self._ledger = ledger
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Hold what goes on; when this ends it ends too, and stays where a crash would leave it."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await cancel_and_wait(*self._tasks)

    def begin(self, *sandboxes: Sandbox) -> asyncio.Task[None]:
        """End these, as one claim wanted to write them; the task is done when they are gone."""
        names = ", ".join(str(item.key) for item in sandboxes)
        return self._begun(self._all(sandboxes), f"disown {names}")

    def begin_all(self, sandboxes: list[Sandbox]) -> None:
        """End these without waiting."""
        self.begin(*sandboxes)

    def after(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do something when everything that is being ended now has ended."""
        return self._begun(self._then(tuple(self._tasks), work), "after cleanup")

    def look_after_resume(self, sandbox: Sandbox) -> asyncio.Task[None]:
        """Find out whether a resume was written; if not, its place is given back."""
        return self._begun(self._resumed_or_not(sandbox), f"look after {sandbox.key}")

    def _begun(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _then(
        self, tasks: tuple[asyncio.Task[None], ...], work: Callable[[], Awaitable[None]]
    ) -> None:
        if tasks:
            await asyncio.wait(tasks)
        try:
            await work()
        except (PaddockError, OSError) as error:
            log.info("was not cleaned up; it goes in time", extra=fields(error=repr(error)))

    async def _all(self, sandboxes: tuple[Sandbox, ...]) -> None:
        for sandbox in sandboxes:
            await self._end(sandbox)
        for lock in {item.spec.claim.lock for item in sandboxes if item.spec.claim}:
            self._ledger.release(lock)

    async def _resumed_or_not(self, sandbox: Sandbox) -> None:
        claim, attempt = sandbox.spec.claim, 0
        while claim is not None:
            try:
                # Where it runs, its event has been taken in and counts it.
                found = await find_written(self._provider, sandbox)
            except (PaddockError, OSError):
                attempt += 1
                await asyncio.sleep(_BACKOFF.delay(attempt))
                continue
            if found is None or found.spec.paused:
                self._ledger.cancel_resume(claim.lock)
            return

    async def _end(self, wanted: Sandbox) -> None:
        looks, attempt = 0, 0
        while looks < _LOOKS:
            try:
                found = await find_written(self._provider, wanted)
                if found is not None:
                    await self._delete(found)
                    return
                looks += 1
                await asyncio.sleep(_BETWEEN_LOOKS)
                if looks == _LOOKS:
                    # It was never ours: if it came from stock, it goes back there.
                    self._pool_members.unreserve(wanted.key)
            except (PaddockError, OSError) as error:
                attempt += 1
                log.info(
                    "failed claim is not cleaned up yet",
                    extra=fields(sandbox=wanted.key, error=repr(error), attempt=attempt),
                )
                await asyncio.sleep(_BACKOFF.delay(attempt))

    async def _delete(self, sandbox: Sandbox) -> None:
        try:
            await self._provider.write.delete(sandbox)
        except NotFoundError:
            return
