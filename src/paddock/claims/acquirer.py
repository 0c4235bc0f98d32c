"""Acquire a sandbox exactly once, for API requests and SandboxClaims alike.

Quota is reserved first. Then one compare-and-swap claims a warm sandbox, or one create makes a new
one: a claim costs at most these writes. A lost reply is looked up by the lock of the claim. The
reservation is released if nothing was written, and kept while that is not known.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims import cold, warm
from paddock.claims.caller import Caller
from paddock.claims.ports import COLD, WARM
from paddock.claims.quota.fair_limiter import FairLimiter
from paddock.claims.quota.ledger import footprint
from paddock.claims.quota.reservations import QuotaReservations
from paddock.kit.clock import Clock
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Resources
from paddock.resources.meta import Key
from paddock.resources.transitions.claim import Terms, claimed

T = TypeVar("T")


class Attempt:
    """One reserved place in the quota, and the writes that use it."""

    def __init__(self, acquirer: "Acquirer", terms: Terms) -> None:
        self._acquirer = acquirer
        self._terms = terms
        self.unresolved: list[Sandbox] = []
        """Writes that may have happened although no reply came."""

    async def take_warm(self, pool: Key | None) -> Sandbox | None:
        """Claim a warm sandbox of the pool; `None` if there is none."""
        if pool is None:
            return None
        acquirer, terms = self._acquirer, self._terms
        acquirer.reservations.require_valid_share(terms.identity.owner)
        now = acquirer.clock.now()
        return await warm.take(
            acquirer.pool_members,
            acquirer.provider,
            pool,
            lambda sandbox: claimed(sandbox, terms, now=now),
            unresolved=self.unresolved,
        )

    async def take_or_create(
        self,
        pool: Key | None,
        new_sandbox: Callable[[], Sandbox] | None,
        *,
        turn_seconds: float | None = None,
    ) -> tuple[Sandbox, str] | None:
        """Claim a warm sandbox, or create one when it is the team's turn; with its source.

        `None` if the pool is empty and `new_sandbox` is not given, or if the turn did not come
        within `turn_seconds`.
        """
        found = await self.take_warm(pool)
        if found is not None:
            return found, WARM
        if new_sandbox is None:
            return None
        try:
            async with asyncio.timeout(turn_seconds):
                await self._acquirer.limiter.acquire(self._terms.identity.owner)
        except TimeoutError:
            return None
        found = await self.take_warm(pool)
        if found is not None:
            return found, WARM
        self._acquirer.reservations.require_valid_share(self._terms.identity.owner)
        created = await cold.create(
            self._acquirer.provider, new_sandbox(), unresolved=self.unresolved
        )
        return created, COLD


class Acquirer:
    """Reserves quota for an attempt and settles the reservation when the attempt ends."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        reservations: QuotaReservations,
        limiter: FairLimiter,
        clock: Clock,
    ) -> None:
        self.provider = provider
        self.pool_members = pool_members
        self.reservations = reservations
        self.limiter = limiter
        self.clock = clock

    async def acquire(
        self,
        caller: Caller,
        terms: Terms,
        size: Resources,
        work: Callable[[Attempt], Awaitable[T]],
        *,
        on_unresolved: Callable[[list[Sandbox]], None],
    ) -> T:
        """Run `work` with a reserved place.

        If it returns `None` or raises, the place is released; unless a write may have happened:
        then `on_unresolved` gets what was to be written, and must release the lock later.
        """
        lock = terms.identity.lock
        await self.reservations.reserve(caller, lock, footprint(size))
        attempt = Attempt(self, terms)
        try:
            acquired = await work(attempt)
        except (asyncio.CancelledError, Exception):
            if attempt.unresolved:
                on_unresolved(attempt.unresolved)
            else:
                self.reservations.release(lock)
            raise
        if acquired is None:
            self.reservations.release(lock)
        return acquired
