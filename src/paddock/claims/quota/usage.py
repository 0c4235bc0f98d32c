"""What a team or a key uses of each limit of its quota, for people."""

from msgspec import Struct

from paddock.claims.quota.ledger import Dimension, Ledger, QuotaScope
from paddock.claims.quota.reservations import QuotaSource
from paddock.claims.quota.stored import StoredLedger


class LimitUsage(Struct, frozen=True, kw_only=True):
    """One amount in use, and its limit if there is one."""

    dimension: Dimension
    scope: QuotaScope
    used: int
    limit: int | None = None


_ALWAYS = (
    (Dimension.COUNT, QuotaScope.ALL),
    (Dimension.COUNT, QuotaScope.RUNNING),
    (Dimension.CPU, QuotaScope.RUNNING),
    (Dimension.MEMORY, QuotaScope.RUNNING),
    (Dimension.STORED, QuotaScope.ALL),
)
"""Shown for every holder, limited or not."""


class QuotaUsage:
    """Usage in all dimensions, reservations included."""

    def __init__(self, ledger: Ledger, stored: StoredLedger, quotas: QuotaSource) -> None:
        self._ledger = ledger
        self._stored = stored
        self._quotas = quotas

    def of(self, holder: str) -> tuple[LimitUsage, ...]:
        """Return the usage of a holder, such as `team:research`."""
        quota = self._quotas.quota_of(holder)
        limits = {
            (item.dimension, item.scope): item.limit for item in (quota.limits if quota else ())
        }
        return tuple(
            LimitUsage(
                dimension=dimension,
                scope=scope,
                used=self._used(holder, dimension, scope),
                limit=limits.get((dimension, scope)),
            )
            for dimension, scope in dict.fromkeys((*_ALWAYS, *limits))
        )

    def _used(self, holder: str, dimension: Dimension, scope: QuotaScope) -> int:
        if dimension is Dimension.STORED:
            return self._stored.used(holder)
        return self._ledger.used(holder, dimension, scope)
