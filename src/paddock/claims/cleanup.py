"""Deletes what a failed claim left, or may have left, in the store.

The client got an error, so no sandbox may stay claimed in its name: neither one that could not be
handed over, nor one that a write without a reply may have made. A background task retries until
the sandbox is known to be gone; its quota stays reserved until then.
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
_READS = 2
"""So many reads, `_BETWEEN_LOOKS` seconds apart, must find nothing before a write counts as not
done: a request that was given up may still be on its way to the store."""
_BETWEEN_LOOKS = 1.0


class ClaimCleanup:
    """Cleans up failed claims in background tasks."""

    def __init__(self, provider: Provider, ledger: Ledger, pool_members: PoolMembers) -> None:
        self._provider = provider
        self._pool_members = pool_members
        self._ledger = ledger
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Own the background tasks; cancelling this cancels them, as a crash would."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await cancel_and_wait(*self._tasks)

    def begin(self, *sandboxes: Sandbox) -> asyncio.Task[None]:
        """Delete the sandboxes that one claim wanted to write; the task ends when they are gone."""
        names = ", ".join(str(item.key) for item in sandboxes)
        return self._start(self._delete_all(sandboxes), f"clean up {names}")

    def begin_all(self, sandboxes: list[Sandbox]) -> None:
        """Delete sandboxes in the background; see `begin`."""
        self.begin(*sandboxes)

    def after(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `work` when all cleanups in progress are done."""
        return self._start(self._then(tuple(self._tasks), work), "after cleanup")

    def resolve_resume(self, sandbox: Sandbox) -> asyncio.Task[None]:
        """Read whether a resume was written; if not, cancel its reservation."""
        return self._start(self._resolve_resume(sandbox), f"resolve resume of {sandbox.key}")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
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
            log.info("cleanup failed; the object will expire", extra=fields(error=repr(error)))

    async def _delete_all(self, sandboxes: tuple[Sandbox, ...]) -> None:
        for sandbox in sandboxes:
            await self._delete_written(sandbox)
        for lock in {item.spec.claim.lock for item in sandboxes if item.spec.claim}:
            self._ledger.release(lock)

    async def _resolve_resume(self, sandbox: Sandbox) -> None:
        claim, attempt = sandbox.spec.claim, 0
        while claim is not None:
            try:
                # If it runs, its event has reached the ledger, which counts it.
                found = await find_written(self._provider, sandbox)
            except (PaddockError, OSError):
                attempt += 1
                await asyncio.sleep(_BACKOFF.delay(attempt))
                continue
            if found is None or found.spec.paused:
                self._ledger.cancel_resume(claim.lock)
            return

    async def _delete_written(self, wanted: Sandbox) -> None:
        reads, attempt = 0, 0
        while reads < _READS:
            try:
                found = await find_written(self._provider, wanted)
                if found is not None:
                    await self._delete(found)
                    return
                reads += 1
                await asyncio.sleep(_BETWEEN_LOOKS)
                if reads == _READS:
                    # It was never written: if it was warm, it is available again.
                    self._pool_members.unreserve(wanted.key)
            except (PaddockError, OSError) as error:
                attempt += 1
                log.info(
                    "cleanup of a failed claim will be retried",
                    extra=fields(sandbox=wanted.key, error=repr(error), attempt=attempt),
                )
                await asyncio.sleep(_BACKOFF.delay(attempt))

    async def _delete(self, sandbox: Sandbox) -> None:
        try:
            await self._provider.write.delete(sandbox)
        except NotFoundError:
            return
