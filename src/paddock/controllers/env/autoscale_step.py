"""Builds the autoscaler's snapshots from member runs and writes its decisions back."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Protocol

from paddock.cache.environments import WaitingClaims
from paddock.cache.pool_members import Members, PoolMembers
from paddock.controllers.env.autoscale import ScaledGroup, ScaledMember, decide
from paddock.controllers.env.claim_rate import ClaimRate
from paddock.controllers.env.member_reconcile import MemberReconcile
from paddock.controllers.env.render import requested_size
from paddock.controllers.pool.controller import Supply
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import AutoscalingState
from paddock.resources.meta import Key

QUEUE_SECONDS = 30.0
"""A queue that another process reported counts for this long."""


class ClaimDemand(Protocol):
    """Source of waiting claims."""

    def waiting(self, env: Key) -> WaitingClaims:
        """Return the claims that wait for an environment."""
        ...


class NoClaimDemand:
    """No claims wait."""

    def waiting(self, env: Key) -> WaitingClaims:
        """Return no waiting claims."""
        return WaitingClaims()


def with_reported_queues(own: WaitingClaims, env: SandboxEnv, now: datetime) -> WaitingClaims:
    """Return this process' queue plus the recent queues of other processes."""
    anywhere, pinned = own.anywhere, dict(own.pinned)
    for queue in env.status.queues:
        if queue.time is None or now - queue.time > timedelta(seconds=QUEUE_SECONDS):
            continue
        anywhere += queue.waiting
        for group, count in queue.pinned.items():
            pinned[group] = pinned.get(group, 0) + count
    return WaitingClaims(anywhere, pinned)


class AutoscaleStep:
    """Runs the autoscaler for all members of an environment."""

    def __init__(self, pool_members: PoolMembers, claim_rate: ClaimRate, supply: Supply) -> None:
        self._supply = supply
        self._pool_members = pool_members
        self._claim_rate = claim_rate

    def observe(self, run: MemberReconcile, now: datetime) -> None:
        """Read the current counts and state of a member."""
        members = self._pool_members.members(run.key)
        run.idle = len(members.available)
        run.running = len(members.allocated) + len(members.reserved)
        run.pending = len(members.creating) + len(members.recycling)
        if run.pool is not None and run.pool.status.autoscaling is not None:
            run.state = run.pool.status.autoscaling
        if run.group is not None and run.is_scaled:
            window = run.group.forecast.window_seconds
            run.state = self._claim_rate.update(run.key, run.state, now, window_seconds=window)

    def decide(self, runs: list[MemberReconcile], waiting: WaitingClaims, now: datetime) -> None:
        """Set the desired size of every member."""
        groups: dict[str, list[MemberReconcile]] = {}
        fixed: dict[str, list[MemberReconcile]] = {}
        for run in runs:
            run.wanted = requested_size(run.member)
            if run.is_scaled:
                target = groups if run.problem is None else fixed
                target.setdefault(run.member.config.scaling_group, []).append(run)
        queues = divide_waiting(groups, waiting, now)
        for name, members in groups.items():
            # ClaimDemand of batches is bound to their pool: no other member can serve it.
            queues[name] += sum(self._supply(run.key) for run in members)
        for name, members in groups.items():
            policy = members[0].group
            if policy is None:
                continue
            group = ScaledGroup(
                policy=policy,
                members=(
                    *(self._member(run, now) for run in members),
                    *(_fixed(run) for run in fixed.get(name, ())),
                ),
                now=now,
                queue=queues[name],
            )
            decisions = {item.name: item for item in decide(group)}
            for run in members:
                decision = decisions[run.name]
                run.decision, run.state, run.wanted = decision, decision.state, decision.target

    def _member(self, run: MemberReconcile, now: datetime) -> ScaledMember:
        config = run.member.config
        return ScaledMember(
            name=run.name,
            replicas=requested_size(run.member),
            idle=run.idle,
            running=run.running,
            idle_ages=_ages(self._pool_members.members(run.key), now),
            queue=self._supply(run.key),
            minimum=config.min_replicas,
            maximum=config.max_replicas,
            priority=config.priority,
            up_priority=config.scale_up_priority,
            down_priority=config.scale_down_priority,
            state=run.state,
        )


def _fixed(run: MemberReconcile) -> ScaledMember:
    """Return a member with a problem: it counts, and keeps its size."""
    return ScaledMember(
        name=run.name,
        replicas=run.size,
        idle=run.idle,
        running=run.running,
        maximum=max(run.size, run.running + run.idle),
        priority=run.member.config.priority,
        state=AutoscalingState(claim_rate=run.state.claim_rate),
    )


def divide_waiting(
    groups: Mapping[str, list[MemberReconcile]], waiting: WaitingClaims, now: datetime
) -> dict[str, int]:
    """Divide waiting claims among groups: spare sandboxes first, then room to grow."""
    queues = {name: waiting.pinned.get(name, 0) for name in groups}
    left = waiting.anywhere
    in_order = sorted(groups, key=lambda name: (_priority(groups[name]), name))
    for name in in_order:
        spare = sum(max(requested_size(run.member) - run.running, run.idle) for run in groups[name])
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


def _priority(runs: list[MemberReconcile]) -> int:
    return min(run.member.config.priority for run in runs)


def _room(runs: list[MemberReconcile], queue: int, now: datetime) -> int:
    room = 0
    for run in runs:
        until, most = run.state.saturated_until, run.member.config.max_replicas
        if until is None or until <= now:
            room += 1 << 30 if most is None else max(most - requested_size(run.member), 0)
    group = runs[0].group
    if group is not None and group.max_replicas is not None:
        size = sum(requested_size(run.member) for run in runs)
        room = min(room, max(group.max_replicas - size, 0))
    return room


def _ages(members: Members, now: datetime) -> tuple[float, ...]:
    ages: list[float] = []
    for sandbox in members.available.values():
        since = sandbox.status.started_at or sandbox.metadata.creation_timestamp
        ages.append((now - since).total_seconds() if since is not None else 0.0)
    ages.sort(reverse=True)
    return tuple(ages)
