"""Knows which member of an environment serves a claim, and keeps those that must wait in line.

A claim that finds an idle sandbox goes to its pool at once, unless somebody stands before it. Who
waits does so for the environment, not for a pool: whichever member has one first serves the one
who is first, by priority and then by time. A promise is counted against a pool's stock until it is
taken, so nobody is sent for the same sandbox twice. How one claim waits is `tickets`' business.

Waiting loses nothing over a restart: SandboxClaims are objects and stand in line again by the time
they were made; clients of the API come again with their idempotency key.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Protocol

from msgspec import Struct, structs

from paddock.cache.environments import EnvSnapshot, EnvSnapshots, WaitingClaims
from paddock.cache.pool_members import PoolMembers
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError, UnavailableError
from paddock.manager.environments.member_choice import (
    MemberCandidate,
    candidate,
    choose,
    choose_federated,
)
from paddock.resources.meta import Key

DEFAULT_RETRY_SECONDS = 5.0
_WAITING = metrics.gauge("paddock_env_claims_waiting", "Claims in line.", ("env",))
_REFUSED = metrics.counter("paddock_env_claims_refused_total", "Claims answered 429.", ("env",))


class QueuePosition(Struct, frozen=True, order=True):
    """A place in line: the higher priority first, then who came first."""

    rank: int
    since: datetime
    number: int


class QueuedClaim:
    """One claim in line."""

    __slots__ = ("grant", "group", "order", "stays_here")

    def __init__(
        self,
        order: QueuePosition,
        group: str,
        grant: Callable[[Key | Exception], None],
        *,
        stays_here: bool = True,
    ) -> None:
        self.order = order
        self.group = group
        self.grant = grant
        self.stays_here = stays_here


class RemoteClusters(Protocol):
    """What other clusters have for an environment."""

    def candidates(self, env: Key) -> tuple[MemberCandidate, ...]:
        """Give their members, as far as is known."""
        ...


class ClaimQueue:
    """Routes claims of one control plane."""

    def __init__(
        self,
        env_snapshots: EnvSnapshots,
        pool_members: PoolMembers,
        clock: Clock,
        *,
        elsewhere: RemoteClusters | None = None,
    ) -> None:
        self._env_snapshots = env_snapshots
        self._pool_members = pool_members
        self._clock = clock
        self._elsewhere = elsewhere
        self._lines: dict[Key, list[QueuedClaim]] = {}
        self._promised: dict[Key, int] = {}
        self._numbers = itertools.count()
        self._listeners: list[Callable[[Key], None]] = []
        self._standing: dict[tuple[Key, Key], list[QueuedClaim]] = {}
        """What SandboxClaims wait for, by claim and environment."""
        self._won: dict[tuple[Key, Key], list[Key]] = {}
        env_snapshots.on_change(self._renewed)
        pool_members.on_change(self._stocked)

    def on_demand(self, listener: Callable[[Key], None]) -> None:
        """Call with an environment's key whenever more or fewer claims wait for it."""
        self._listeners.append(listener)

    def waiting(self, env: Key) -> WaitingClaims:
        """Say how many claims wait."""
        line = self._lines.get(env, ())
        pinned: dict[str, int] = {}
        for waiter in line:
            if waiter.group:
                pinned[waiter.group] = pinned.get(waiter.group, 0) + 1
        return WaitingClaims(len(line) - sum(pinned.values()), pinned)

    def snapshots(self) -> Mapping[Key, EnvSnapshot]:
        """Give what is known of every environment of this cluster."""
        return self._env_snapshots.all()

    def length(self, env: Key) -> int:
        """Say how many stand in line."""
        return len(self._lines.get(env, ()))

    def order(self, priority: int) -> QueuePosition:
        """Give the place in line of a claim that has just come."""
        return QueuePosition(-priority, self._clock.now(), next(self._numbers))

    # ---- choosing ------------------------------------------------------------------------

    def candidates(self, env: Key, group: str = "") -> tuple[MemberCandidate, ...]:
        """Give the members of this cluster, with what is idle this very moment."""
        snapshot = self._env_snapshots.get(env)
        if snapshot is None:
            return ()
        return self._local(snapshot, group)

    def _local(self, snapshot: EnvSnapshot, group: str) -> tuple[MemberCandidate, ...]:
        now, waiting = self._clock.now(), len(self._lines.get(snapshot.env, ()))
        return tuple(
            candidate(
                member,
                now=now,
                taken_at=snapshot.taken_at,
                idle=self._idle(member.pool),
                queue=waiting,
            )
            for member in snapshot.members
            if not group or member.scaling_group == group
        )

    def _idle(self, pool: Key) -> int:
        return len(self._pool_members.members(pool).available) - self._promised.get(pool, 0)

    def _ahead(self, env: Key, order: QueuePosition, group: str) -> Iterator[QueuedClaim]:
        """Give those who stand before this one and want the same."""
        for item in self._lines.get(env, ()):
            if item.order >= order:
                return
            if not item.group or not group or item.group == group:
                yield item

    def now(self, env: Key, order: QueuePosition, group: str) -> Key | None:
        """Give the pool that serves at once, unless somebody stands before this one."""
        if next(self._ahead(env, order, group), None) is not None:
            return None
        best = choose(item for item in self.candidates(env, group) if item.can_serve)
        return best.pool if best is not None else None

    def federated(
        self, env: Key, order: QueuePosition, group: str, skipped: frozenset[str]
    ) -> MemberCandidate | None:
        """Give the best member of all clusters; `None` means to wait here."""
        here = self.candidates(env, group)
        there = self._elsewhere.candidates(env) if self._elsewhere is not None else ()
        there = tuple(item for item in there if item.cluster not in skipped)
        if group:
            there = tuple(item for item in there if item.scaling_group == group)
        # What is idle there belongs to those who stand before this one; they look again soon.
        ahead = sum(not item.stays_here for item in self._ahead(env, order, group))
        if ahead and sum(item.idle for item in there) <= ahead:
            there = tuple(structs.replace(item, idle=0) for item in there)
        return choose_federated((*here, *there))

    def pool_for(self, env: Key, wanted: int, at_once: int) -> Key | None:
        """Give the member that a batch should be served by; `None` where there is none.

        One serves all of it: best one with room for the whole, or for what it wants at once.
        """
        found = self.candidates(env)
        large_enough = (
            choose(item for item in found if item.room >= count) for count in (wanted, at_once)
        )
        best = next(filter(None, large_enough), None) or choose(found)
        return best.pool if best is not None else None

    def refusal(self, env: Key, group: str, ahead: int) -> Exception | None:
        """Say why waiting would be in vain, if it would."""
        snapshot = self._env_snapshots.get(env)
        if snapshot is None:
            return None
        found = self._local(snapshot, group)
        if not found:
            what = f"no member of group {group!r}" if group else "no member in this cluster"
            return UnavailableError(
                f"environment {env.name} has {what}",
                retry_after_seconds=DEFAULT_RETRY_SECONDS,
                hint="add a member to its segment, or name another group",
            )
        if any(item.can_grow for item in found) or sum(item.pending for item in found) > ahead:
            return None
        _REFUSED.labels(env.name).inc()
        return RateLimitedError(
            f"every member of environment {env.name} is saturated",
            retry_after_seconds=self._retry_after(snapshot),
            hint="raise maxReplicas or the quota, or end sandboxes that are not needed",
        )

    def _retry_after(self, snapshot: EnvSnapshot) -> float:
        now = self._clock.now()
        waits = [
            (member.saturated_until - now).total_seconds()
            for member in snapshot.members
            if member.saturated_until is not None and member.saturated_until > now
        ]
        return max(min(waits, default=DEFAULT_RETRY_SECONDS), 1.0)

    # ---- the line ------------------------------------------------------------------------

    def join(self, env: Key, waiter: QueuedClaim) -> None:
        """Put one into line."""
        bisect.insort(self._lines.setdefault(env, []), waiter, key=lambda item: item.order)
        self._changed(env)
        self._pump(env)

    def leave(self, env: Key, waiter: QueuedClaim) -> None:
        """Take one out of line."""
        line = self._lines.get(env)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        if not line:
            del self._lines[env]
        self._changed(env)

    def settle(self, env: Key, pool: Key) -> None:
        """Take in that a promise was kept or is void."""
        left = self._promised.get(pool, 0) - 1
        if left > 0:
            self._promised[pool] = left
        else:
            self._promised.pop(pool, None)
        self._pump(env)

    def _changed(self, env: Key) -> None:
        _WAITING.labels(env.name).set(len(self._lines.get(env, ())))
        for listener in self._listeners:
            listener(env)

    def _stocked(self, pool: Key) -> None:
        env = self._env_snapshots.env_of(pool)
        if env is not None and env in self._lines:
            self._pump(env)

    def _renewed(self, env: Key) -> None:
        if env in self._lines:
            self._pump(env)
            self._turn_away(env)

    def _pump(self, env: Key) -> None:
        """Promise what is idle to those who are first."""
        index = 0
        while index < self.length(env):
            waiter = self._lines[env][index]
            best = choose(item for item in self.candidates(env, waiter.group) if item.can_serve)
            if best is None:
                if not waiter.group:
                    return
                index += 1
                continue
            self._promised[best.pool] = self._promised.get(best.pool, 0) + 1
            self.leave(env, waiter)
            waiter.grant(best.pool)

    def _turn_away(self, env: Key) -> None:
        """Refuse those for whom nothing is coming, the last in line first."""
        for ahead, waiter in reversed(tuple(enumerate(self._lines.get(env, ())))):
            error = self.refusal(env, waiter.group, ahead)
            if error is not None:
                waiter.grant(error)

    # ---- claims that are objects ---------------------------------------------------------

    def enqueue(
        self,
        claim: Key,
        env: Key,
        *,
        count: int,
        priority: int,
        since: datetime,
        wake: Callable[[Key], None],
    ) -> None:
        """Let a SandboxClaim stand in line for so many; `wake` is called when some are its."""
        place = (claim, env)
        waiters = self._standing.setdefault(place, [])
        while len(waiters) > count:
            self.leave(env, waiters.pop())
        while len(waiters) < count:
            order = QueuePosition(-priority, since, next(self._numbers))
            waiter = QueuedClaim(order, "", partial(self._win, place, order, wake))
            waiters.append(waiter)
            self.join(env, waiter)
            count -= waiter not in waiters
        if not waiters:
            self._standing.pop(place, None)

    def _win(
        self,
        place: tuple[Key, Key],
        order: QueuePosition,
        wake: Callable[[Key], None],
        granted: Key | Exception,
    ) -> None:
        if isinstance(granted, Exception):
            # It is an object and has its own time limit: it stays in line.
            return
        waiters = self._standing.get(place, [])
        waiters[:] = [item for item in waiters if item.order != order]
        self._won.setdefault(place, []).append(granted)
        wake(place[0])

    def take_granted(self, claim: Key, env: Key) -> Key | None:
        """Give a pool that was promised to a SandboxClaim; take from it at once, then `settle`."""
        pools = self._won.get((claim, env))
        if not pools:
            return None
        pool = pools.pop()
        if not pools:
            del self._won[claim, env]
        return pool

    def forget(self, claim: Key) -> None:
        """Take everything of a SandboxClaim's out of line."""
        for place in [item for item in self._standing if item[0] == claim]:
            for waiter in self._standing.pop(place):
                self.leave(place[1], waiter)
        for place in [item for item in self._won if item[0] == claim]:
            for pool in self._won.pop(place):
                self.settle(place[1], pool)
