"""Reads and writes the records of quota shares.

One Lease per team that has a quota, in the system namespace; every change is a compare-and-swap.
The arithmetic is in `share_math`; `share_manager` decides when to write.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from paddock.cache.provider import Provider
from paddock.cache.states import is_running_or_pausing
from paddock.claims.caller import LABEL_KIND
from paddock.claims.quota import share_math
from paddock.claims.quota.ledger import (
    Dimension,
    Ledger,
    QuotaLimit,
    QuotaScope,
    UsageKey,
    counted_claim,
    footprint,
    holders,
    resources_of,
)
from paddock.claims.quota.share_math import LimitView, Share, TeamShares
from paddock.kit.clock import Clock
from paddock.kit.errors import AlreadyExistsError, ConflictError, NotFoundError
from paddock.kit.logs import fields
from paddock.resources.kinds.builtin import Lease
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key, ObjectMeta, with_meta
from paddock.resources.selectors import parse_fields

log = logging.getLogger(__name__)

KIND_SHARES = "quota-shares"
ANNOTATION = "paddock.dev/quota-shares"
USE_SECONDS = 20.0
"""How long a share may be used after its last write, by the clock of its own process."""
EXPIRY_SECONDS = 90.0
"""How long a share must be unchanged before other processes close it, by their clocks. The
difference to `USE_SECONDS` is longer than any write takes."""


class Demand(Struct, frozen=True):
    """The amount of one limit that one more sandbox needs."""

    holder: str
    limit: QuotaLimit
    size: int

    @property
    def usage_key(self) -> UsageKey:
        """The key of the usage that the limit bounds."""
        return self.holder, self.limit.dimension, self.limit.scope


class TeamAccount:
    """This process's share of one team's quotas."""

    def __init__(self, team: str, namespace: str) -> None:
        digest = hashlib.sha256(team.encode()).hexdigest()[:32]
        self.team = team
        self.key = Key(namespace, f"quota-{digest}")
        self.lock = asyncio.Lock()
        """Held while the record is written."""
        self.amounts: Mapping[str, int] = {}
        """The amounts we may use; lowered before the record is written, raised after."""
        self.usable_until = 0.0
        self.used_at = 0.0
        self.waiting = 0
        self.needs: dict[str, Demand] = {}
        """The last demand on each usage key."""
        self.changed = asyncio.Event()


class ShareStore:
    """Reads and writes shares, and tracks how long each has been unchanged."""

    def __init__(self, ledger: Ledger, provider: Provider, clock: Clock, namespace: str) -> None:
        self._ledger = ledger
        self._namespace = namespace
        self._own_account = ledger.account
        self._provider = provider
        self._clock = clock
        self._changed_at: dict[Key, dict[str, tuple[Share, float]]] = {}
        """Each share of each record, with the time of its last observed change."""

    def observe(self, lease: Lease) -> None:
        """Apply one event of the Lease informer."""
        now = self._clock.monotonic()
        before = self._changed_at.get(lease.key, {})
        self._changed_at[lease.key] = {
            name: before[name] if name in before and before[name][0] == share else (share, now)
            for name, share in _read(lease).shares.items()
        }

    @property
    def seen(self) -> int:
        """The store version up to which our cache of sandboxes is complete."""
        return self._provider.informer(Sandbox).seen

    def shares_of(self, account: TeamAccount) -> tuple[TeamShares, Lease | None]:
        """Return a team's shares and their Lease."""
        lease = self._provider.informer(Lease).get(account.key)
        return _read(lease), lease

    def view(self, need: Demand) -> LimitView:
        """Return the usage that we see for a demand."""
        accounts = self._ledger.accounts(need.usage_key)
        return LimitView(
            limit=need.limit.limit,
            size=need.size,
            mine=accounts.get(self._own_account, 0),
            others={name: used for name, used in accounts.items() if name != self._own_account},
            unaccounted=self._ledger.used(*need.usage_key) - sum(accounts.values()),
        )

    def seconds_unchanged(self, account: TeamAccount, name: str) -> float:
        """Return how long a share has been unchanged, in seconds, as far as we have observed."""
        now = self._clock.monotonic()
        _, heard = self._changed_at.get(account.key, {}).get(name, (None, now))
        return now - heard

    async def write(self, account: TeamAccount, lease: Lease | None, wanted: TeamShares) -> bool:
        """Write the shares and use ours; return False if another process was first.

        After any other error they may have been written: then the record grants more than we use,
        which does no harm.
        """
        wanted = share_math.without_ended(
            wanted, self._own_account, self._in_use(account), seen=self.seen
        )
        mine = wanted.shares.get(self._own_account, Share())
        started = self._clock.monotonic()
        # What we give back is not used from here on, whether or not the write succeeds.
        account.amounts = {
            name: min(amount, mine.amounts.get(name, 0)) for name, amount in account.amounts.items()
        }
        try:
            if lease is None:
                await self._provider.write.create(_made(account, wanted))
            else:
                await self._provider.write.update(_with(lease, wanted))
        except (ConflictError, AlreadyExistsError, NotFoundError):
            await self._refresh(account)
            return False
        account.amounts = mine.amounts
        account.usable_until = 0.0 if mine.closed_at else started + USE_SECONDS
        return True

    def _in_use(self, account: TeamAccount) -> dict[str, int]:
        """Return the number of sandboxes, or of running sandboxes, by account."""
        team = f"team:{account.team}"
        everything = self._ledger.accounts((team, Dimension.COUNT, QuotaScope.ALL))
        return {**self._ledger.accounts((team, Dimension.COUNT, QuotaScope.RUNNING)), **everything}

    async def _refresh(self, account: TeamAccount) -> None:
        """Read the record from the store into the cache."""
        try:
            found = await self._provider.live.get(Lease, account.key)
        except NotFoundError:
            return
        self._provider.informer(Lease).observe(found)

    async def close_expired(self, account: TeamAccount) -> bool:
        """Close expired shares of other processes; return whether there were any."""
        expired = [
            name
            for name, share in self.shares_of(account)[0].shares.items()
            if name != self._own_account
            and not share.closed_at
            and self.seconds_unchanged(account, name) >= EXPIRY_SECONDS
        ]
        if not expired:
            return False
        # Their usage is read from the store: our cache may lack their last writes.
        owned = parse_fields(f"spec.claim.owner={account.team}")
        page = await self._provider.live.list(Sandbox, fields=owned)
        shares_of, lease = self.shares_of(account)
        for name in expired:
            if self.seconds_unchanged(account, name) >= EXPIRY_SECONDS:
                used = {
                    item: _used(page.items, name, item) for item in shares_of.shares[name].amounts
                }
                shares_of = share_math.closed(shares_of, name, at=page.version, amounts=used)
        log.warning("expired quota shares closed", extra=fields(team=account.team, of=expired))
        await self.write(account, lease, shares_of)
        return True

    async def version(self) -> str:
        """Return the current store version: all writes so far have this version or an older one."""
        return (await self._provider.live.list(Lease, namespace=self._namespace, limit=1)).version


def usage_name(key: UsageKey) -> str:
    """Return the name of a usage key in the record."""
    return " ".join(key)


def parse_usage_name(name: str) -> UsageKey:
    """Return the usage key of a name in the record."""
    holder, dimension, scope = name.rsplit(" ", 2)
    return holder, Dimension(dimension), QuotaScope(scope)


def _used(sandboxes: Iterable[Sandbox], account: str, name: str) -> int:
    """Return the usage of an account."""
    holder, dimension, scope = parse_usage_name(name)
    return sum(
        footprint(resources_of(sandbox)).of(dimension)
        for sandbox in sandboxes
        if (claim := counted_claim(sandbox)) is not None
        and holder in holders(claim.owner, claim.key_id)
        and (
            claim.account == account
            if scope is QuotaScope.ALL
            else (claim.running_account or claim.account) == account
            and is_running_or_pausing(sandbox)
        )
    )


def _read(lease: Lease | None) -> TeamShares:
    found = lease.metadata.annotations.get(ANNOTATION, "") if lease is not None else ""
    return msgspec.json.decode(found, type=TeamShares) if found else TeamShares()


def _with(lease: Lease, shares_of: TeamShares) -> Lease:
    annotations = {
        **lease.metadata.annotations,
        ANNOTATION: msgspec.json.encode(shares_of).decode(),
    }
    return with_meta(lease, annotations=annotations)


def _made(account: TeamAccount, shares_of: TeamShares) -> Lease:
    meta = ObjectMeta(
        name=account.key.name, namespace=account.key.namespace, labels={LABEL_KIND: KIND_SHARES}
    )
    return _with(Lease(metadata=meta), shares_of)
