"""The wait of one API request for an environment: this cluster, other clusters, the queue."""

import asyncio
from collections.abc import Mapping

from paddock.kit.errors import RateLimitedError
from paddock.manager.environments.member_choice import MemberCandidate
from paddock.manager.environments.queue import ClaimQueue, QueuedClaim
from paddock.resources.meta import Key

RECHECK_SECONDS = 1.0
"""How often a waiting request checks other clusters again."""


class Ticket:
    """One request's position in the queue; call `pool` again if the granted sandbox was gone."""

    def __init__(self, queue: ClaimQueue, env: Key, *, priority: int = 0, group: str = "") -> None:
        self._queue = queue
        self._env = env
        self._order = queue.order(priority)
        self._group = group
        self._grant: Key | None = None
        self.skipped: frozenset[str] = frozenset()
        """Clusters that rejected this request."""
        self.stays_here = False
        """Whether only this cluster may serve the request."""

    async def pool(self, *, may_wait: bool = True) -> Key | MemberCandidate:
        """Return the pool of this cluster, or the member of another, that serves this request."""
        self.release_grant()
        while True:
            pool = self._queue.now(self._env, self._order, self._group)
            if pool is not None:
                return pool
            best = None
            if not self.stays_here:
                best = self._queue.federated(self._env, self._order, self._group, self.skipped)
            if best is not None and not best.is_local:
                return best
            if not may_wait:
                raise RateLimitedError(
                    f"no idle sandbox in environment {self._env.name}", retry_after_seconds=1
                )
            error = self._queue.refusal(self._env, self._group, self._queue.length(self._env))
            if error is not None:
                raise error
            await self._wait()
            if self._grant is not None:
                return self._grant

    def release_grant(self) -> None:
        """End the grant, if there is one."""
        if self._grant is not None:
            pool, self._grant = self._grant, None
            self._queue.release_grant(self._env, pool)

    async def _wait(self) -> None:
        turn: asyncio.Future[Key] = asyncio.get_running_loop().create_future()

        def grant(granted: Key | Exception) -> None:
            if turn.done():
                if not isinstance(granted, Exception):
                    self._queue.release_grant(self._env, granted)
            elif isinstance(granted, Exception):
                turn.set_exception(granted)
            else:
                turn.set_result(granted)

        waiter = QueuedClaim(self._order, self._group, grant, stays_here=self.stays_here)
        self._queue.join(self._env, waiter)
        try:
            async with asyncio.timeout(None if self.stays_here else RECHECK_SECONDS):
                await turn
        except TimeoutError:
            # The position stays the same: only other clusters are checked again.
            return
        finally:
            self._queue.leave(self._env, waiter)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._grant = turn.result()


def queue_preferences(metadata: Mapping[str, str]) -> tuple[int, str]:
    """Return the priority and scaling group in the metadata of a request."""
    text = metadata.get("paddock.dev/priority", "0")
    try:
        priority = int(text)
    except ValueError:
        priority = 0
    return priority, metadata.get("paddock.dev/scaling-group", "")
