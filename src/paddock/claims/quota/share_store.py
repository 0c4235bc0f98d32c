"""The books in which processes share quotas out: where they are kept, and how they are written.

One Lease per team that has a quota, in the system namespace; every change is a compare-and-swap.
What a book means is in `shares`; when it is written is `apportioning`'s business.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from paddock.cache.provider import Provider
from paddock.claims.caller import LABEL_KIND
from paddock.claims.quota import share_math
from paddock.claims.quota.ledger import (
    Dimension,
    Ledger,
    QuotaLimit,
    QuotaScope,
    UsageKey,
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
"""How long a share may be used after it was last written, by its own process's clock."""
DEAD_SECONDS = 90.0
"""How long nothing is heard of a share before others close it, by their clocks. What is between
the two is more than any write takes."""


class Demand(Struct, frozen=True):
    """One more sandbox, seen from one limit."""

    holder: str
    limit: QuotaLimit
    size: int

    @property
    def line(self) -> UsageKey:
        """What it counts on."""
        return self.holder, self.limit.dimension, self.limit.scope


class TeamAccount:
    """What this process has of one team's quotas."""

    def __init__(self, team: str, namespace: str) -> None:
        digest = hashlib.sha256(team.encode()).hexdigest()[:32]
        self.team = team
        self.key = Key(namespace, f"quota-{digest}")
        self.lock = asyncio.Lock()
        """Held by whoever writes the book."""
        self.amounts: Mapping[str, int] = {}
        """What we may have; lowered before, raised after the book says so."""
        self.usable_until = 0.0
        self.used_at = 0.0
        self.waiting = 0
        self.needs: dict[str, Demand] = {}
        """The last need of each line."""
        self.changed = asyncio.Event()


class ShareStore:
    """Reads and writes books, and knows how long each share has been as it is."""

    def __init__(self, ledger: Ledger, provider: Provider, clock: Clock, namespace: str) -> None:
        self._ledger = ledger
        self._namespace = namespace
        self._me = ledger.account
        self._provider = provider
        self._clock = clock
        self._heard: dict[Key, dict[str, tuple[Share, float]]] = {}
        """Each share of each book as it was last seen to change, and when."""

    def observe(self, lease: Lease) -> None:
        """Take in one event of the Lease informer."""
        now = self._clock.monotonic()
        before = self._heard.get(lease.key, {})
        self._heard[lease.key] = {
            name: before[name] if name in before and before[name][0] == share else (share, now)
            for name, share in _read(lease).shares.items()
        }

    @property
    def seen(self) -> int:
        """How far in the store's sequence our picture of sandboxes is."""
        return self._provider.informer(Sandbox).seen

    def book(self, account: TeamAccount) -> tuple[TeamShares, Lease | None]:
        """Give a team's book, and what it is written in."""
        lease = self._provider.informer(Lease).get(account.key)
        return _read(lease), lease

    def view(self, need: Demand) -> LimitView:
        """Give what we see of a line."""
        accounts = self._ledger.accounts(need.line)
        return LimitView(
            limit=need.limit.limit,
            size=need.size,
            mine=accounts.get(self._me, 0),
            others={name: used for name, used in accounts.items() if name != self._me},
            unaccounted=self._ledger.used(*need.line) - sum(accounts.values()),
        )

    def silent_for(self, account: TeamAccount, name: str) -> float:
        """Say how long a share has been as it is, as far as we have seen."""
        now = self._clock.monotonic()
        _, heard = self._heard.get(account.key, {}).get(name, (None, now))
        return now - heard

    async def write(self, account: TeamAccount, lease: Lease | None, wanted: TeamShares) -> bool:
        """Write a book and take our share from it; whether nobody else was first.

        After any other error it may have been written: then the book says more than we take,
        and no harm is done.
        """
        wanted = share_math.without_ended(wanted, self._me, self._in_use(account), seen=self.seen)
        mine = wanted.shares.get(self._me, Share())
        started = self._clock.monotonic()
        # What we give back is not ours from here on, whatever becomes of the write.
        account.amounts = {
            name: min(amount, mine.amounts.get(name, 0)) for name, amount in account.amounts.items()
        }
        try:
            if lease is None:
                await self._provider.write.create(_made(account, wanted))
            else:
                await self._provider.write.update(_with(lease, wanted))
        except (ConflictError, AlreadyExistsError, NotFoundError):
            await self._look(account)
            return False
        account.amounts = mine.amounts
        account.usable_until = 0.0 if mine.closed_at else started + USE_SECONDS
        return True

    def _in_use(self, account: TeamAccount) -> dict[str, int]:
        """Give what each account of a team still has: sandboxes, or sandboxes that run."""
        team = f"team:{account.team}"
        everything = self._ledger.accounts((team, Dimension.COUNT, QuotaScope.ALL))
        return {**self._ledger.accounts((team, Dimension.COUNT, QuotaScope.RUNNING)), **everything}

    async def _look(self, account: TeamAccount) -> None:
        """Read the book past the cache."""
        try:
            found = await self._provider.live.get(Lease, account.key)
        except NotFoundError:
            return
        self._provider.informer(Lease).observe(found)

    async def close_dead(self, account: TeamAccount) -> bool:
        """Close the shares of processes that were not heard of for long; whether there were any."""
        dead = [
            name
            for name, share in self.book(account)[0].shares.items()
            if name != self._me
            and not share.closed_at
            and self.silent_for(account, name) >= DEAD_SECONDS
        ]
        if not dead:
            return False
        # What they had is read anew: our picture may lack what they wrote last.
        owned = parse_fields(f"spec.claim.owner={account.team}")
        page = await self._provider.live.list(Sandbox, fields=owned)
        book, lease = self.book(account)
        for name in dead:
            if self.silent_for(account, name) >= DEAD_SECONDS:
                used = {item: _used(page.items, name, item) for item in book.shares[name].amounts}
                book = share_math.closed(book, name, at=page.version, amounts=used)
        log.warning("shares of silent processes closed", extra=fields(team=account.team, of=dead))
        await self.write(account, lease, book)
        return True

    async def version(self) -> str:
        """Ask how far the store is: everything written so far is of this version or older."""
        return (await self._provider.live.list(Lease, namespace=self._namespace, limit=1)).version


def text(line: UsageKey) -> str:
    """Give a line's name in a book."""
    return " ".join(line)


def line(name: str) -> UsageKey:
    """Give the line that has this name in a book."""
    holder, dimension, scope = name.rsplit(" ", 2)
    return holder, Dimension(dimension), QuotaScope(scope)


def _used(sandboxes: Iterable[Sandbox], account: str, name: str) -> int:
    """Count what an account has of a line."""
    holder, dimension, scope = line(name)
    return sum(
        footprint(resources_of(sandbox)).of(dimension)
        for sandbox in sandboxes
        if (claim := sandbox.spec.claim) is not None
        and holder in holders(claim.owner, claim.key_id)
        and (
            claim.account == account
            if scope is QuotaScope.ALL
            else (claim.running_account or claim.account) == account and not sandbox.spec.paused
        )
    )


def _read(lease: Lease | None) -> TeamShares:
    found = lease.metadata.annotations.get(ANNOTATION, "") if lease is not None else ""
    return msgspec.json.decode(found, type=TeamShares) if found else TeamShares()


def _with(lease: Lease, book: TeamShares) -> Lease:
    annotations = {**lease.metadata.annotations, ANNOTATION: msgspec.json.encode(book).decode()}
    return with_meta(lease, annotations=annotations)


def _made(account: TeamAccount, book: TeamShares) -> Lease:
    meta = ObjectMeta(
        name=account.key.name, namespace=account.key.namespace, labels={LABEL_KIND: KIND_SHARES}
    )
    return _with(Lease(metadata=meta), book)
