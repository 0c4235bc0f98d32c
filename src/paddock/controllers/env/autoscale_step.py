"""From cases to decisions: takes the autoscaler's snapshots and writes decisions into the cases."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Protocol

from paddock.cache.environments import WaitingClaims
from paddock.cache.pool_members import Members, PoolMembers
from paddock.controllers.env.autoscale import Group, Member, decide
from paddock.controllers.env.claim_rate import ClaimMeter
from paddock.controllers.env.member_state import Case
from paddock.controllers.env.render import asked_size
from paddock.controllers.pool.controller import Supply
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import AutoscalingState
from paddock.resources.meta import Key

QUEUE_SECONDS = 30.0
"""What another process said about its queue counts for so long."""


class Demand(Protocol):
    """Who knows which claims wait."""

    def waiting(self, env: Key) -> WaitingClaims:
        """Say how many claims wait for an environment."""
        ...


class NoDemand:
    """Nothing waits, ever."""

    def waiting(self, env: Key) -> WaitingClaims:
        """Say that none wait."""
        return WaitingClaims()


def heard(own: WaitingClaims, env: SandboxEnv, now: datetime) -> WaitingClaims:
    """Add what other processes have said of late to what waits in this one."""
    anywhere, pinned = own.anywhere, dict(own.pinned)
    for queue in env.status.queues:
        if queue.time is None or now - queue.time > timedelta(seconds=QUEUE_SECONDS):
            continue
        anywhere += queue.waiting
        for group, count in queue.pinned.items():
            pinned[group] = pinned.get(group, 0) + count
    return WaitingClaims(anywhere, pinned)


class Scaler:
    """Decides for all members of an environment."""

    def __init__(self, pool_members: PoolMembers, meter: ClaimMeter, supply: Supply) -> None:
        self._supply = supply
        self._pool_members = pool_members
        self._meter = meter

    def look(self, case: Case, now: datetime) -> None:
        """Fill in what is there now."""
        members = self._pool_members.members(case.key)
        case.idle = len(members.available)
        case.running = len(members.allocated) + len(members.reserved)
        case.pending = len(members.creating)
        if case.pool is not None and case.pool.status.autoscaling is not None:
            case.state = case.pool.status.autoscaling
        if case.group is not None and case.is_scaled:
            window = case.group.forecast.window_seconds
            case.state = self._meter.update(case.key, case.state, now, window_seconds=window)

    def decide(self, cases: list[Case], waiting: WaitingClaims, now: datetime) -> None:
        """Write what is wanted into every case."""
        groups: dict[str, list[Case]] = {}
        stuck: dict[str, list[Case]] = {}
        for case in cases:
            case.wanted = asked_size(case.member)
            if case.is_scaled:
                whither = groups if case.problem is None else stuck
                whither.setdefault(case.member.config.scaling_group, []).append(case)
        queues = share_out(groups, waiting, now)
        for name, members in groups.items():
            # Batches ask their pool, not the environment: no other member can serve them.
            queues[name] += sum(self._supply(case.key) for case in members)
        for name, members in groups.items():
            policy = members[0].group
            if policy is None:
                continue
            group = Group(
                policy=policy,
                members=(
                    *(self._member(case, now) for case in members),
                    *(_as_it_is(case) for case in stuck.get(name, ())),
                ),
                now=now,
                queue=queues[name],
            )
            decisions = {item.name: item for item in decide(group)}
            for case in members:
                decision = decisions[case.name]
                case.decision, case.state, case.wanted = decision, decision.state, decision.target

    def _member(self, case: Case, now: datetime) -> Member:
        config = case.member.config
        return Member(
            name=case.name,
            replicas=asked_size(case.member),
            idle=case.idle,
            running=case.running,
            idle_ages=_ages(self._pool_members.members(case.key), now),
            queue=self._supply(case.key),
            minimum=config.min_replicas,
            maximum=config.max_replicas,
            priority=config.priority,
            up_priority=config.scale_up_priority,
            down_priority=config.scale_down_priority,
            state=case.state,
        )


def _as_it_is(case: Case) -> Member:
    """Give a member with which something is wrong: what it has counts, and it stays so."""
    return Member(
        name=case.name,
        replicas=case.size,
        idle=case.idle,
        running=case.running,
        maximum=max(case.size, case.running + case.idle),
        priority=case.member.config.priority,
        state=AutoscalingState(claim_rate=case.state.claim_rate),
    )


def share_out(
    groups: Mapping[str, list[Case]], waiting: WaitingClaims, now: datetime
) -> dict[str, int]:
    """Say which group answers for which waiting claims: who has some, then the first with room."""
    queues = {name: waiting.pinned.get(name, 0) for name in groups}
    left = waiting.anywhere
    in_order = sorted(groups, key=lambda name: (_priority(groups[name]), name))
    for name in in_order:
        spare = sum(max(asked_size(case.member) - case.running, case.idle) for case in groups[name])
        take = min(left, max(spare - queues[name], 0))
        queues[name] += take
        left -= take
    for name in in_order:
        take = min(left, _room(groups[name], queues[name], now))
        queues[name] += take
        left -= take
    if left and in_order:
        queues[in_order[0]] += left
    return queues


def _priority(cases: list[Case]) -> int:
    return min(case.member.config.priority for case in cases)


def _room(cases: list[Case], queue: int, now: datetime) -> int:
    room = 0
    for case in cases:
        until, most = case.state.saturated_until, case.member.config.max_replicas
        if until is None or until <= now:
            room += 1 << 30 if most is None else max(most - asked_size(case.member), 0)
    group = cases[0].group
    if group is not None and group.max_replicas is not None:
        size = sum(asked_size(case.member) for case in cases)
        room = min(room, max(group.max_replicas - size, 0))
    return room


def _ages(members: Members, now: datetime) -> tuple[float, ...]:
    ages: list[float] = []
    for sandbox in members.available.values():
        since = sandbox.status.started_at or sandbox.metadata.creation_timestamp
        ages.append((now - since).total_seconds() if since is not None else 0.0)
    ages.sort(reverse=True)
    return tuple(ages)
