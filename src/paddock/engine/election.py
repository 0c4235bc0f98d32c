"""One leader at a time, by a Lease in the store.

The winner of the compare-and-swap leads, and renews. Others take over when the lease has not
changed for its whole duration *by their own monotonic clock*: times written by another machine
are never compared with ours, so clock skew does no harm. A leader that could not renew within
its renew deadline (shorter than the lease) stops leading before another can start.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import datetime

from msgspec import Struct, structs

from paddock.kit import clock as clocks
from paddock.kit import metrics
from paddock.kit.errors import AlreadyExistsError, ConflictError, NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.kit.tasks import background
from paddock.resources.kinds.builtin import Lease, LeaseSpec
from paddock.resources.meta import Key, ObjectMeta
from paddock.store.port import Store

log = logging.getLogger(__name__)

_TIMER_SLACK_SECONDS = 0.001
"""Timers may fire slightly early; so little is not worth another round."""

_LEADING = metrics.gauge("paddock_leader", "1 while this process leads.", ("lease",))


class Timing(Struct, frozen=True, kw_only=True):
    """Timeouts. A leader stops after `renew`, a follower takes over after `lease`."""

    lease_seconds: float = 15.0
    renew_seconds: float = 10.0
    """A leader that has not renewed for so long stops leading."""
    retry_seconds: float = 2.0
    """Between tries, with jitter."""

    def __post_init__(self) -> None:
        if not 0 < self.retry_seconds < self.renew_seconds < self.lease_seconds:
            raise ValueError("a lease needs 0 < retry < renew < lease seconds")


class _Observed(Struct, frozen=True):
    """A lease as it was read last, and when it was first read so, by our clock."""

    spec: LeaseSpec
    since: float


class Elector:
    """Takes part in the election for one lease."""

    def __init__(
        self,
        store: Store,
        key: Key,
        identity: str,  # Unlike any other's, also after a restart: a name and something random.
        *,
        timing: Timing | None = None,
        clock: clocks.Clock | None = None,
    ) -> None:
        self.identity = identity
        self._store = store
        self._key = key
        self._timing = timing or Timing()
        self._clock = clock or clocks.system()
        self._observed: _Observed | None = None
        self._renewed_at: float | None = None
        self._lease: Lease | None = None
        self._gauge = _LEADING.labels(str(key))

    @property
    def is_leader(self) -> bool:
        """Whether this process may act as leader now."""
        return self._seconds_left() > 0

    @property
    def term(self) -> int:
        """A number that increases when the leader changes; fences writes of former leaders."""
        spec = self._lease.spec if self._lease is not None else LeaseSpec()
        return spec.lease_transitions or 0

    @property
    def leader(self) -> str:
        """The identity of the leader as last read; empty if there is none."""
        return (self._observed.spec.holder_identity or "") if self._observed else ""

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Campaign, run `lead` while leading, and begin again when leadership is lost.

        `lead` is cancelled when leadership is lost. When it returns or raises by itself, so does
        this, and the lease is released.
        """
        try:
            while True:
                await self._campaign()
                log.info("leading", extra=fields(lease=self._key, term=self.term))
                self._gauge.set(1)
                try:
                    if await self._lead(lead):
                        return
                finally:
                    self._gauge.set(0)
                log.warning("leadership lost", extra=fields(lease=self._key, leader=self.leader))
        finally:
            await self._release()

    async def _campaign(self) -> None:
        while not await self._try_acquire(self._timing.retry_seconds):
            # A lease of another that expires soon is tried at that moment, not later.
            await self._sleep(self._seconds_to_expiry() or float("inf"))

    async def _lead(self, lead: Callable[[], Awaitable[None]]) -> bool:
        """Run `lead` until it returns (true) or leadership is lost (false)."""

        async def work() -> None:
            await lead()

        async with (
            background(work(), name=f"lead {self._key}") as leading,
            background(self._renew_until_lost(), name=f"renew {self._key}") as renewing,
        ):
            await asyncio.wait((leading, renewing), return_when=asyncio.FIRST_COMPLETED)
            if leading.done():
                await leading
                return True
            await renewing
            return False

    async def _renew_until_lost(self) -> None:
        """Renew until that fails for too long or another process leads."""
        while (left := self._seconds_left()) > _TIMER_SLACK_SECONDS:
            # Neither sleep nor wait for the store beyond the moment at which we must stop.
            await self._sleep(left)
            if (left := self._seconds_left()) <= _TIMER_SLACK_SECONDS:
                break
            if not await self._try_acquire(left) and self.leader not in ("", self.identity):
                break
        self._renewed_at = None

    def _seconds_left(self) -> float:
        if self._renewed_at is None:
            return 0.0
        return self._renewed_at + self._timing.renew_seconds - self._clock.monotonic()

    def _seconds_to_expiry(self) -> float:
        """Return the seconds until another's lease expires, or 0."""
        if self._observed is None:
            return 0.0
        spec, since = self._observed.spec, self._observed.since
        left = since + self._duration(spec) - self._clock.monotonic()
        return left if left > _TIMER_SLACK_SECONDS else 0.0

    async def _sleep(self, at_most: float = float("inf")) -> None:
        jitter = 1.0 + 0.2 * random.random()  # noqa: S311 - spreads load, guards nothing
        await asyncio.sleep(min(self._timing.retry_seconds * jitter, at_most))

    async def _try_acquire(self, timeout_seconds: float) -> bool:
        """Try once to take or renew the lease; return whether we hold it."""
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(timeout_seconds):
                held = await self._take_or_renew()
        except (PaddockError, OSError, TimeoutError) as error:
            log.info("lease request failed", extra=fields(lease=self._key, error=repr(error)))
            return False
        if held:
            # Counted from before the write: others count from when they saw it, which is later.
            self._renewed_at = began
        return held

    async def _take_or_renew(self) -> bool:
        # Write over the last known lease. A conflict means another process wrote it; then read it.
        left = self._lease if self.is_leader else None
        if left is not None and await self._write(left, is_mine=True):
            return True
        try:
            lease = await self._store.get(Lease, self._key)
        except NotFoundError:
            return await self._create()
        self._observe(lease.spec)
        holder = lease.spec.holder_identity or ""
        if holder not in ("", self.identity) and not self._has_expired(lease.spec):
            return False
        return await self._write(lease, is_mine=holder == self.identity)

    async def _create(self) -> bool:
        meta = ObjectMeta(namespace=self._key.namespace, name=self._key.name)
        now = self._clock.now()
        try:
            lease = await self._store.create(Lease(metadata=meta, spec=self._spec(now, now, 1)))
        except AlreadyExistsError:
            return False
        self._accept(lease)
        return True

    async def _write(self, lease: Lease, *, is_mine: bool) -> bool:
        now, spec = self._clock.now(), lease.spec
        acquired = spec.acquire_time if is_mine and spec.acquire_time else now
        # A predecessor of the same name (a restart) is another leader: its writes must be fenced.
        is_continued = is_mine and self._renewed_at is not None
        transitions = (spec.lease_transitions or 0) + (0 if is_continued else 1)
        new = structs.replace(lease, spec=self._spec(acquired, now, transitions))
        try:
            self._accept(await self._store.update(new))
        except (ConflictError, NotFoundError):
            return False
        return True

    def _spec(self, acquired: datetime, renewed: datetime, transitions: int) -> LeaseSpec:
        return LeaseSpec(
            holder_identity=self.identity,
            lease_duration_seconds=max(1, round(self._timing.lease_seconds)),
            acquire_time=acquired,
            renew_time=renewed,
            lease_transitions=transitions,
        )

    def _accept(self, lease: Lease) -> None:
        self._lease = lease
        self._observe(lease.spec)

    def _observe(self, spec: LeaseSpec) -> None:
        if self._observed is None or self._observed.spec != spec:
            self._observed = _Observed(spec, self._clock.monotonic())

    def _has_expired(self, spec: LeaseSpec) -> bool:
        if self._observed is None:
            return False
        return (
            self._clock.monotonic() - self._observed.since
            >= self._duration(spec) - _TIMER_SLACK_SECONDS
        )

    def _duration(self, spec: LeaseSpec) -> float:
        return spec.lease_duration_seconds or self._timing.lease_seconds

    async def _release(self) -> None:
        """Release the lease, so that the next leader need not wait; best effort."""
        was_leader, left = self._renewed_at is not None, self._seconds_left()
        self._renewed_at = None
        if not was_leader:
            return
        try:
            # A server that is slow costs the next one less than a lease that has to run out.
            async with asyncio.timeout(max(left, self._timing.retry_seconds)):
                while not await self._is_given_up():
                    pass  # a renewal that was under way came first
        except (PaddockError, OSError, TimeoutError) as error:
            log.info("lease not released", extra=fields(lease=self._key, error=repr(error)))
            return
        log.info("lease released", extra=fields(lease=self._key))

    async def _is_given_up(self) -> bool:
        lease = await self._store.get(Lease, self._key)
        spec = lease.spec
        if spec.holder_identity != self.identity or (spec.lease_transitions or 0) != self.term:
            return True  # another process holds it
        free = structs.replace(spec, holder_identity="", lease_duration_seconds=1)
        try:
            await self._store.update(structs.replace(lease, spec=free))
        except ConflictError:
            return False
        return True
