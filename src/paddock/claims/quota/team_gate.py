"""Quotas and turns for those who claim without an API key: declared claims count like others."""

from paddock.claims.caller import Caller
from paddock.claims.limiter import FairLimiter
from paddock.claims.quota.ledger import footprint
from paddock.claims.quota.reservations import QuotaReservations
from paddock.resources.kinds.template import Resources


class TeamGate:
    """Lets a team have as much as its quota allows, and create when it is its turn."""

    def __init__(self, reservations: QuotaReservations, limiter: FairLimiter) -> None:
        self._reservations = reservations
        self._limiter = limiter

    @property
    def account(self) -> str:
        """What is written on what is claimed, where several processes share quotas."""
        return self._reservations.account

    async def reserve(self, team: str, lock: str, resources: Resources) -> None:
        """Count one more before it is written; `QuotaExceededError` counts nothing."""
        await self._reservations.reserve(Caller(team), lock, footprint(resources))

    def must_hold(self, team: str) -> None:
        """Raise `UnavailableError` where what was counted may not be written any more."""
        self._reservations.must_hold(team)

    def release(self, lock: str) -> None:
        """Forget one whose write is known not to have happened."""
        self._reservations.release(lock)

    async def turn(self, team: str) -> None:
        """Wait for this team's turn at creating one."""
        await self._limiter.acquire(team)
