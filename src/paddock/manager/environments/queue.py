"""The queue of claims on environments, and the choice of the member that serves each.

A claim that finds an idle sandbox gets its pool at once, unless another claim is ahead of it.
Claims queue for the environment, not for a pool: the first member with an idle sandbox serves the
first claim, by priority and then by time. A grant counts against the idle sandboxes of its pool
until it is released, so that no sandbox is granted twice. `ticket` is the wait of one API request.

A restart loses no place: SandboxClaims are objects and are queued again by creation time; clients
of the API retry with their idempotency key.
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
    """A position in the queue: higher priority first, then earlier arrival."""

    rank: int
    since: datetime
    number: int


class QueuedClaim:
    """One claim in the queue."""

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
    """Members of an environment in other clusters."""

    def candidates(self, env: Key) -> tuple[MemberCandidate, ...]:
        """Return their members, as last announced."""
        ...


class ClaimQueue:
    """The queue of one control plane."""

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
        self._queues: dict[Key, list[QueuedClaim]] = {}
        self._granted_counts: dict[Key, int] = {}
        self._numbers = itertools.count()
        self._listeners: list[Callable[[Key], None]] = []
        self._queued: dict[tuple[Key, Key], list[QueuedClaim]] = {}
        """Queued requests of SandboxClaims, by claim and environment."""
        self._granted: dict[tuple[Key, Key], list[Key]] = {}
        env_snapshots.on_change(self._on_snapshot)
        pool_members.on_change(self._on_pool_change)

    def on_demand(self, listener: Callable[[Key], None]) -> None:
        """Call `listener` with an environment's key whenever its queue length changes."""
        self._listeners.append(listener)

    def waiting(self, env: Key) -> WaitingClaims:
        """Return how many claims wait, in all and by scaling group."""
        line = self._queues.get(env, ())
        pinned: dict[str, int] = {}
        for waiter in line:
            if waiter.group:
                pinned[waiter.group] = pinned.get(waiter.group, 0) + 1
        return WaitingClaims(len(line) - sum(pinned.values()), pinned)

    def snapshots(self) -> Mapping[Key, EnvSnapshot]:
        """Return the snapshots of all environments of this cluster."""
        return self._env_snapshots.all()

    def length(self, env: Key) -> int:
        """Return the queue length."""
        return len(self._queues.get(env, ()))

    def order(self, priority: int) -> QueuePosition:
        """Return the position of a claim that arrives now."""
        return QueuePosition(-priority, self._clock.now(), next(self._numbers))

    # ---- choosing ------------------------------------------------------------------------

    def candidates(self, env: Key, group: str = "") -> tuple[MemberCandidate, ...]:
        """Return the members of this cluster, with their idle sandboxes as of now."""
        snapshot = self._env_snapshots.get(env)
        if snapshot is None:
            return ()
        return self._local(snapshot, group)

    def _local(self, snapshot: EnvSnapshot, group: str) -> tuple[MemberCandidate, ...]:
        now, waiting = self._clock.now(), len(self._queues.get(snapshot.env, ()))
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
        return len(self._pool_members.members(pool).available) - self._granted_counts.get(pool, 0)

    def _ahead(self, env: Key, order: QueuePosition, group: str) -> Iterator[QueuedClaim]:
        """Yield claims ahead of this position that compete for the same members."""
        for item in self._queues.get(env, ()):
            if item.order >= order:
                return
            if not item.group or not group or item.group == group:
                yield item

    def now(self, env: Key, order: QueuePosition, group: str) -> Key | None:
        """Return the pool that can serve at once; `None` if a competing claim is ahead."""
        if next(self._ahead(env, order, group), None) is not None:
            return None
        best = choose(item for item in self.candidates(env, group) if item.can_serve)
        return best.pool if best is not None else None

    def federated(
        self, env: Key, order: QueuePosition, group: str, skipped: frozenset[str]
    ) -> MemberCandidate | None:
        """Return the best member of all clusters; `None` means to wait here."""
        here = self.candidates(env, group)
        there = self._elsewhere.candidates(env) if self._elsewhere is not None else ()
        there = tuple(item for item in there if item.cluster not in skipped)
        if group:
            there = tuple(item for item in there if item.scaling_group == group)
        # Idle sandboxes there belong to the claims ahead, which will look again soon.
        ahead = sum(not item.stays_here for item in self._ahead(env, order, group))
        if ahead and sum(item.idle for item in there) <= ahead:
            there = tuple(structs.replace(item, idle=0) for item in there)
        return choose_federated((*here, *there))

    def pool_for(
        self, env: Key, wanted: int, at_once: int, promised: Callable[[Key], int]
    ) -> Key | None:
        """Return the member that should serve a batch; `None` if there is none.

        One member serves all of it: preferably one with room for the whole batch, else for the
        part that it needs at once. `promised` returns what other batches wait for at a pool.
        """
        found = tuple(
            structs.replace(item, idle=item.idle - promised(item.pool))
            for item in self.candidates(env)
        )
        large_enough = (
            choose(item for item in found if item.room >= count) for count in (wanted, at_once)
        )
        best = next(filter(None, large_enough), None) or choose(found)
        return best.pool if best is not None else None

    def refusal(self, env: Key, group: str, ahead: int) -> Exception | None:
        """Return the error if waiting cannot succeed, else `None`."""
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

    # ---- the queue -----------------------------------------------------------------------

    def join(self, env: Key, waiter: QueuedClaim) -> None:
        """Add a claim to the queue."""
        bisect.insort(self._queues.setdefault(env, []), waiter, key=lambda item: item.order)
        self._changed(env)
        self._serve_queue(env)

    def leave(self, env: Key, waiter: QueuedClaim) -> None:
        """Remove a claim from the queue."""
        line = self._queues.get(env)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        if not line:
            del self._queues[env]
        self._changed(env)

    def release_grant(self, env: Key, pool: Key) -> None:
        """End a grant: its sandbox was taken, or was not there."""
        left = self._granted_counts.get(pool, 0) - 1
        if left > 0:
            self._granted_counts[pool] = left
        else:
            self._granted_counts.pop(pool, None)
        self._serve_queue(env)

    def _changed(self, env: Key) -> None:
        _WAITING.labels(env.name).set(len(self._queues.get(env, ())))
        for listener in self._listeners:
            listener(env)

    def _on_pool_change(self, pool: Key) -> None:
        env = self._env_snapshots.env_of(pool)
        if env is not None and env in self._queues:
            self._serve_queue(env)

    def _on_snapshot(self, env: Key) -> None:
        if env in self._queues:
            self._serve_queue(env)
            self._reject_hopeless(env)

    def _serve_queue(self, env: Key) -> None:
        """Grant idle sandboxes to the first claims."""
        index = 0
        while index < self.length(env):
            waiter = self._queues[env][index]
            best = choose(item for item in self.candidates(env, waiter.group) if item.can_serve)
            if best is None:
                if not waiter.group:
                    return
                index += 1
                continue
            self._granted_counts[best.pool] = self._granted_counts.get(best.pool, 0) + 1
            self.leave(env, waiter)
            waiter.grant(best.pool)

    def _reject_hopeless(self, env: Key) -> None:
        """Reject claims that cannot be served, the last in the queue first."""
        for ahead, waiter in reversed(tuple(enumerate(self._queues.get(env, ())))):
            error = self.refusal(env, waiter.group, ahead)
            if error is not None:
                waiter.grant(error)

    # ---- SandboxClaims -------------------------------------------------------------------

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
        """Queue a SandboxClaim for `count` sandboxes in all; `wake` is called on each grant."""
        place = (claim, env)
        waiters = self._queued.setdefault(place, [])
        while len(waiters) > count:
            self.leave(env, waiters.pop())
        while len(waiters) < count:
            order = QueuePosition(-priority, since, next(self._numbers))
            waiter = QueuedClaim(order, "", partial(self._on_grant, place, order, wake))
            waiters.append(waiter)
            self.join(env, waiter)
            count -= waiter not in waiters
        if not waiters:
            self._queued.pop(place, None)

    def _on_grant(
        self,
        place: tuple[Key, Key],
        order: QueuePosition,
        wake: Callable[[Key], None],
        granted: Key | Exception,
    ) -> None:
        if isinstance(granted, Exception):
            # A SandboxClaim has its own timeout: it stays queued.
            return
        waiters = self._queued.get(place, [])
        waiters[:] = [item for item in waiters if item.order != order]
        self._granted.setdefault(place, []).append(granted)
        wake(place[0])

    def take_granted(self, claim: Key, env: Key) -> Key | None:
        """Return a pool granted to a SandboxClaim: take from it at once, then `release_grant`."""
        pools = self._granted.get((claim, env))
        if not pools:
            return None
        pool = pools.pop()
        if not pools:
            del self._granted[claim, env]
        return pool

    def forget(self, claim: Key) -> None:
        """Remove a SandboxClaim from all queues and return its grants."""
        for place in [item for item in self._queued if item[0] == claim]:
            for waiter in self._queued.pop(place):
                self.leave(place[1], waiter)
        for place in [item for item in self._granted if item[0] == claim]:
            for pool in self._granted.pop(place):
                self.release_grant(place[1], pool)
