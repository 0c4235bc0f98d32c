"""Quota reservations, as claims and resumes make them.

`QuotaReservations` is for a process that serves alone: its ledger counts every sandbox, so a
check against the ledger is enough. `share_manager.ShareManager` is for one of several processes.
"""

from typing import Protocol

from paddock.claims.caller import Caller
from paddock.claims.quota.ledger import Footprint, Ledger, Quota


class QuotaSource(Protocol):
    """The quotas of teams and keys; `manager/keys.py` implements it."""

    @property
    def namespace(self) -> str:
        """The namespace of this installation's records."""
        ...

    def quotas(self, caller: Caller) -> tuple[tuple[str, Quota | None], ...]:
        """Return the quotas that a caller's claims count against, by holder."""
        ...

    def quota_of(self, holder: str) -> Quota | None:
        """Return the quota of one holder as it is now."""
        ...


class QuotaReservations:
    """Reserves in a ledger, within the quotas of teams and keys."""

    def __init__(self, ledger: Ledger, quotas: QuotaSource) -> None:
        self.ledger = ledger
        self.quotas = quotas

    @property
    def account(self) -> str:
        """The account to write to claims; empty if this process serves alone."""
        return self.ledger.account

    async def reserve(self, caller: Caller, lock: str, size: Footprint) -> None:
        """Reserve before the claim is written; `QuotaExceededError` reserves nothing."""
        self.ledger.reserve(lock, self.quotas.quotas(caller), size)

    async def reserve_resume(self, caller: Caller, lock: str) -> None:
        """Reserve a running sandbox before a resume; `QuotaExceededError` reserves nothing."""
        self.ledger.reserve_resume(lock, self.quotas.quotas(caller))

    def require_valid_share(self, team: str) -> None:
        """Raise `UnavailableError` if reservations of this team may no longer be written."""

    def release(self, lock: str) -> None:
        """Release a reservation whose write is known not to have happened."""
        self.ledger.release(lock)

    def cancel_resume(self, lock: str) -> None:
        """Release the reservation of a resume that was not written."""
        self.ledger.cancel_resume(lock)
