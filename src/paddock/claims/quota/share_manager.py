"""Quotas where several processes serve: each process claims within a share of its own.

A team without a quota costs nothing. A team far from its limit costs one write per block of
claims, outside the path of most claims; a team at its limit one write per claim. A share is
renewed while it is used, given back as far as it is not, and closed when its process stops or is
idle. A process without a share, or with one that was not renewed in time, takes a new one before
it writes the next claim.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.cache.states import is_running_or_pausing
from paddock.claims.caller import Caller
from paddock.claims.quota import share_math, share_store
from paddock.claims.quota.ledger import (
    OF_SANDBOXES,
    Footprint,
    Ledger,
    Quota,
    QuotaScope,
    counted_claim,
    exceeded,
)
from paddock.claims.quota.reservations import QuotaReservations, QuotaSource
from paddock.claims.quota.share_store import USE_SECONDS, Demand, ShareStore, TeamAccount
from paddock.kit.backoff import Backoff
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError, QuotaExceededError, UnavailableError
from paddock.kit.logs import fields
from paddock.resources.kinds.builtin import Lease
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

log = logging.getLogger(__name__)

WAIT_SECONDS = 3.0
"""Longest wait of a claim for an unused share that another process will give back."""
GATHER_SECONDS = 0.05
MAINTENANCE_SECONDS = 1.0
LEAVE_SECONDS = 3.0
_BACKOFF = Backoff(base_seconds=0.005, cap_seconds=0.2, jitter=1.0)
_ATTEMPTS = 50

Quotas = Iterable[tuple[str, Quota | None]]


class ShareManager(QuotaReservations):
    """Reserves within this process's shares of quotas, and keeps the shares up to date."""

    def __init__(
        self, ledger: Ledger, quotas: QuotaSource, provider: Provider, clock: Clock
    ) -> None:
        super().__init__(ledger, quotas)
        self._own_account = ledger.account
        self._clock = clock
        self._store = ShareStore(ledger, provider, clock, quotas.namespace)
        self._teams: dict[str, TeamAccount] = {}
        self._by_key: dict[Key, TeamAccount] = {}
        self._wake = asyncio.Event()
        provider.informer(Lease).subscribe(self._observe_shares)
        provider.informer(Sandbox).subscribe(self._observe_sandbox)

    # ---- reserving -----------------------------------------------------------------------

    async def reserve(self, caller: Caller, lock: str, size: Footprint) -> None:
        """Reserve before the claim is written; `QuotaExceededError` reserves nothing."""
        quotas = self.quotas.quotas(caller)
        await self._ensure_room(caller.team, quotas, size, (QuotaScope.ALL, QuotaScope.RUNNING))
        self.ledger.reserve(lock, quotas, size)

    async def reserve_resume(self, caller: Caller, lock: str) -> None:
        """Reserve a running sandbox before a resume; `QuotaExceededError` reserves nothing."""
        quotas = self.quotas.quotas(caller)
        size = self.ledger.paused_size(lock)
        if size is not None:
            await self._ensure_room(caller.team, quotas, size, (QuotaScope.RUNNING,))
        self.ledger.reserve_resume(lock, quotas)

    def require_valid_share(self, team: str) -> None:
        """Raise `UnavailableError` if the share of this team was not renewed in time."""
        account = self._teams.get(team)
        if account is not None and account.usable_until <= self._clock.monotonic():
            raise UnavailableError(
                f"the share of team {team}'s quota could not be renewed in time",
                hint="the store does not answer, or this process was suspended; try again",
                retry_after_seconds=1,
            )

    async def _ensure_room(
        self, team: str, quotas: Quotas, size: Footprint, scopes: tuple[QuotaScope, ...]
    ) -> None:
        """Return when our share has room for one more; no await follows the last check."""
        needs: dict[str, Demand] = {}
        for holder, quota in quotas:
            for limit in quota.limits if quota else ():
                if limit.scope in scopes and limit.dimension in OF_SANDBOXES:
                    need = Demand(holder, limit, size.of(limit.dimension))
                    needs[share_store.usage_name(need.usage_key)] = need
        if not needs:
            return
        for holder, quota in quotas:
            self.ledger.check(holder, quota, size, scopes)
        account = self._account(team)
        account.used_at = self._clock.monotonic()
        account.needs.update(needs)
        if self._fits(account, needs):
            return
        account.waiting += 1
        try:
            await self._wait_for_room(account, needs)
        finally:
            account.waiting -= 1

    async def _wait_for_room(self, account: TeamAccount, needs: Mapping[str, Demand]) -> None:
        until = self._clock.monotonic() + WAIT_SECONDS
        while True:
            account.changed.clear()
            async with account.lock:
                refusal = None if self._fits(account, needs) else await self._grow(account, needs)
                if self._fits(account, needs):
                    return
            if refusal is None:
                continue
            left = until - self._clock.monotonic()
            if left <= 0 or not self._may_be_given_back(account, needs):
                raise refusal
            try:
                async with asyncio.timeout(left):
                    await account.changed.wait()
            except TimeoutError:
                raise refusal from None

    def _fits(self, account: TeamAccount, needs: Mapping[str, Demand]) -> bool:
        return account.usable_until > self._clock.monotonic() and all(
            self.ledger.held_by(self._own_account, need.usage_key) + need.size
            <= account.amounts.get(name, 0)
            for name, need in needs.items()
        )

    def _may_be_given_back(self, account: TeamAccount, needs: Mapping[str, Demand]) -> bool:
        """Whether live processes have unused shares that would be enough if given back."""
        team_shares, _ = self._store.shares_of(account)
        for name, need in needs.items():
            view = self._store.view(need)
            room = share_math.free(
                team_shares, self._own_account, name, view, seen=self._store.seen
            )
            for other, share in team_shares.shares.items():
                is_there = self._store.seconds_unchanged(account, other) <= USE_SECONDS
                if other != self._own_account and not share.closed_at and is_there:
                    room += max(share.amounts.get(name, 0) - view.others.get(other, 0), 0)
            if room < need.size:
                return False
        return True

    async def _grow(
        self, account: TeamAccount, needs: Mapping[str, Demand]
    ) -> QuotaExceededError | None:
        """Enlarge our share by one write; return the error if the quota has no room."""
        for attempt in range(1, _ATTEMPTS + 1):
            team_shares, lease = self._store.shares_of(account)
            views = {name: self._store.view(need) for name, need in needs.items()}
            seen = self._store.seen
            wanted = share_math.grown(
                team_shares, self._own_account, views, waiting=account.waiting, seen=seen
            )
            if wanted is None:
                if await self._store.close_expired(account):
                    continue
                left = {
                    name: share_math.free(team_shares, self._own_account, name, view, seen=seen)
                    for name, view in views.items()
                }
                name = min(needs, key=lambda item: left[item] - needs[item].size)
                need = needs[name]
                used = need.limit.limit - max(left[name], 0)
                return exceeded(need.holder, need.limit, used=used, needed=need.size)
            if await self._store.write(account, lease, wanted):
                return None
            await asyncio.sleep(_BACKOFF.delay(attempt))
        raise UnavailableError(
            f"the shares of team {account.team}'s quota change too often",
            retry_after_seconds=1,
        )

    # ---- events --------------------------------------------------------------------------

    def _account(self, team: str) -> TeamAccount:
        account = self._teams.get(team)
        if account is None:
            account = self._teams[team] = TeamAccount(team, self.quotas.namespace)
            self._by_key[account.key] = account
            self._wake.set()
        return account

    def _observe_shares(self, old: Lease | None, new: Lease | None) -> None:
        lease = new or old
        if lease is None:
            return
        if new is not None:
            self._store.observe(new)
        account = self._by_key.get(lease.key)
        if account is not None:
            account.changed.set()
            self._wake.set()

    def _observe_sandbox(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Wake the maintenance of a team's share when its usage may have dropped."""
        claim = old.spec.claim if old is not None else None
        account = self._teams.get(claim.owner) if claim is not None else None
        is_running = (
            new is not None and counted_claim(new) is not None and is_running_or_pausing(new)
        )
        if account is None or is_running:
            return
        account.changed.set()
        self._wake.set()

    # ---- maintenance ---------------------------------------------------------------------

    async def run(self) -> None:
        """Renew, give back and close shares, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(MAINTENANCE_SECONDS if self._teams else None):
                    await self._wake.wait()
            except TimeoutError:
                # Nothing has changed but the time.
                pass
            await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()
            for account in tuple(self._teams.values()):
                try:
                    async with account.lock:
                        await self._maintain(account)
                except (PaddockError, OSError) as error:
                    log.warning(
                        "maintenance of a quota share failed",
                        extra=fields(team=account.team, error=repr(error)),
                    )

    async def _maintain(self, account: TeamAccount) -> None:
        now = self._clock.monotonic()
        team_shares, lease = self._store.shares_of(account)
        share = team_shares.shares.get(self._own_account)
        is_open = share is not None and not share.closed_at
        is_needed = account.waiting or self.ledger.is_pending(f"team:{account.team}")
        if now - account.used_at > USE_SECONDS and not is_needed:
            if is_open:
                await self._close(account)
            else:
                del self._teams[account.team], self._by_key[account.key]
            return
        if not is_open:
            return
        needs = {name: self._with_current_limit(need) for name, need in account.needs.items()}
        views = {name: self._store.view(need) for name, need in needs.items() if need is not None}
        wanted = share_math.kept(team_shares, self._own_account, views, seen=self._store.seen)
        if wanted is None and account.usable_until - now < USE_SECONDS / 2:
            wanted = share_math.renewed(team_shares, self._own_account)
        if wanted is not None and not await self._store.write(account, lease, wanted):
            self._wake.set()

    def _with_current_limit(self, need: Demand) -> Demand | None:
        """Return a demand with the current limit; `None` if the limit is gone."""
        quota = self.quotas.quota_of(need.holder)
        for limit in quota.limits if quota else ():
            if (limit.dimension, limit.scope) == (need.limit.dimension, need.limit.scope):
                return structs.replace(need, limit=limit)
        return None

    async def _close(self, account: TeamAccount) -> None:
        """Return unused places and close our share, which then counts by usage."""
        account.usable_until = 0.0
        # A claim in flight may still be written: the share stays open, and is closed later.
        is_pending = self.ledger.is_pending(f"team:{account.team}")
        version = "" if is_pending else await self._store.version()
        for attempt in range(1, _ATTEMPTS + 1):
            team_shares, lease = self._store.shares_of(account)
            share = team_shares.shares.get(self._own_account)
            if share is None or share.closed_at:
                return
            used = {
                name: self.ledger.held_by(self._own_account, share_store.parse_usage_name(name))
                for name in share.amounts
            }
            wanted = share_math.closed(team_shares, self._own_account, at=version, amounts=used)
            if await self._store.write(account, lease, wanted):
                return
            await asyncio.sleep(_BACKOFF.delay(attempt))

    async def leave(self) -> None:
        """Return every share, as far as the store responds in time."""
        for account in tuple(self._teams.values()):
            try:
                async with asyncio.timeout(LEAVE_SECONDS), account.lock:
                    await self._close(account)
            except (PaddockError, OSError) as error:
                log.info(
                    "quota share was not given back; another process will close it",
                    extra=fields(team=account.team, error=repr(error)),
                )
