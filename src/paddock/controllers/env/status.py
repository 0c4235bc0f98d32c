"""What an environment's status says, and what its router is told: pure, from cases.

Only this cluster's segment is written; what other clusters said of theirs is passed on untouched.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.environments import EnvSnapshot, MemberSnapshot
from paddock.controllers.env.member_state import Case, Problem
from paddock.resources.kinds.env import (
    MemberState,
    ObservedCluster,
    ObservedGroup,
    ObservedMember,
    SandboxEnv,
    SandboxEnvStatus,
)
from paddock.resources.kinds.template import Resources
from paddock.resources.meta import Condition, ConditionStatus, set_condition

CONDITION_READY = "Ready"
CONDITION_TEMPLATE = "TemplateConsistent"
CONDITION_AUTOSCALING = "AutoscalingActive"
CONDITION_ADMITTED = "Admitted"
SNAPSHOT_SECONDS = 30.0
"""A snapshot in which nothing changed is dated anew this often."""


def headrooms(cases: Sequence[Case]) -> dict[str, int | None]:
    """Say how many more each member may have; `None` is without bound, 0 where nobody scales it."""
    sizes: dict[str, int] = {}
    for case in cases:
        group = case.member.config.scaling_group
        sizes[group] = sizes.get(group, 0) + max(case.granted, case.running)
    found: dict[str, int | None] = {}
    for case in cases:
        if not case.is_scaled or case.group is None or case.problem is not None:
            found[case.name] = 0
            continue
        rooms: list[int] = []
        if case.member.config.max_replicas is not None:
            rooms.append(case.member.config.max_replicas - case.granted)
        if case.group.max_replicas is not None:
            rooms.append(case.group.max_replicas - sizes[case.member.config.scaling_group])
        found[case.name] = max(min(rooms), 0) if rooms else None
    return found


def snapshot(env: SandboxEnv, cases: Sequence[Case], *, cluster: str, now: datetime) -> EnvSnapshot:
    """Give what the router must know."""
    rooms = headrooms(cases)
    return EnvSnapshot(
        env=env.key,
        cluster=cluster,
        taken_at=now,
        members=tuple(
            MemberSnapshot(
                name=case.name,
                pool=case.key,
                priority=case.member.config.priority,
                scaling_group=case.member.config.scaling_group,
                idle=case.idle,
                pending=max(case.granted - case.running - case.idle, 0),
                headroom=rooms[case.name],
                saturated_until=case.state.saturated_until,
            )
            for case in cases
            if case.pool is not None
        ),
    )


def aggregate(
    env: SandboxEnv,
    cases: Sequence[Case],
    *,
    cluster: str,
    waiting: int,
    template_problem: Problem | None,
    now: datetime,
) -> SandboxEnvStatus:
    """Give the status as it should be."""
    rooms = headrooms(cases)
    local = ObservedCluster(
        cluster_id=cluster,
        is_local=True,
        last_snapshot_time=now,
        observed_members=tuple(_observed(case, rooms[case.name], now) for case in cases),
    )
    before = next((item for item in env.status.clusters if item.cluster_id == cluster), None)
    if before is not None and _is_fresh(before, local, now):
        local = before
    clusters = (*(item for item in env.status.clusters if item.cluster_id != cluster), local)
    members = [member for item in clusters for member in item.observed_members]
    conditions = env.status.conditions
    for new in _conditions(env, cases, template_problem):
        conditions = set_condition(conditions, new, now=now)
    return SandboxEnvStatus(
        observed_generation=env.metadata.generation,
        member_count=len(members),
        desired=sum(member.desired for member in members),
        running=sum(member.running for member in members),
        idle=sum(member.idle for member in members),
        waiting=waiting,
        queues=env.status.queues,
        clusters=tuple(sorted(clusters, key=lambda item: item.cluster_id)),
        scaling_groups=_groups(local),
        conditions=conditions,
    )


def is_only_counts(old: SandboxEnvStatus, new: SandboxEnvStatus) -> bool:
    """Say whether nothing changed but numbers, which can wait a moment."""
    return (
        old.conditions == new.conditions
        and old.observed_generation == new.observed_generation
        and _states(old) == _states(new)
    )


def _states(status: SandboxEnvStatus) -> list[tuple[str, str, MemberState, str]]:
    return [
        (cluster.cluster_id, member.name, member.state, member.message)
        for cluster in status.clusters
        for member in cluster.observed_members
    ]


def _is_fresh(before: ObservedCluster, now_seen: ObservedCluster, now: datetime) -> bool:
    same = structs.replace(before, last_snapshot_time=None) == structs.replace(
        now_seen, last_snapshot_time=None
    )
    dated = before.last_snapshot_time
    return same and dated is not None and now - dated < timedelta(seconds=SNAPSHOT_SECONDS)


def _observed(case: Case, headroom: int | None, now: datetime) -> ObservedMember:
    pool = case.pool
    made_of = pool.spec.template if pool is not None else None
    until = case.state.saturated_until
    problem = case.problem or case.refusal
    return ObservedMember(
        name=case.name,
        pool=case.key.name if pool is not None else "",
        state=_state(case, headroom, now),
        idle=case.idle,
        running=case.running,
        pending=case.pending,
        desired=case.granted,
        current=case.idle + case.running + case.pending,
        saturated_until=until if until is not None and until > now else None,
        scale_up_headroom=headroom,
        scaling_group=case.member.config.scaling_group,
        autoscaling_enabled=case.is_scaled,
        priority=case.member.config.priority,
        effective_resources=made_of.resources if made_of is not None else Resources(),
        revision=pool.status.revision if pool is not None else "",
        updated=pool.status.updated if pool is not None else 0,
        message=problem.message if problem is not None else case.state.message,
    )


def _state(case: Case, headroom: int | None, now: datetime) -> MemberState:
    if case.problem is not None:
        return MemberState.INCONSISTENT
    if case.pool is None:
        return MemberState.MISSING
    until = case.state.saturated_until
    is_full = headroom == 0 and not case.idle and not case.pending and case.granted > 0
    if is_full or (until is not None and until > now):
        return MemberState.SATURATED
    return MemberState.ACTIVE


def _groups(local: ObservedCluster) -> tuple[ObservedGroup, ...]:
    names = sorted({member.scaling_group for member in local.observed_members})
    groups: list[ObservedGroup] = []
    for name in names:
        found = [item for item in local.observed_members if item.scaling_group == name]
        groups.append(
            ObservedGroup(
                name=name,
                total_idle=sum(item.idle for item in found),
                total_running=sum(item.running for item in found),
                total_desired=sum(item.desired for item in found),
            )
        )
    return tuple(groups)


def _conditions(
    env: SandboxEnv, cases: Sequence[Case], template_problem: Problem | None
) -> tuple[Condition, ...]:
    problems = [(case.name, case.problem) for case in cases if case.problem is not None]
    refusals = [(case.name, case.refusal) for case in cases if case.refusal is not None]
    missing = [case.name for case in cases if case.pool is None and case.problem is None]
    scaled = [case.name for case in cases if case.is_scaled]
    ready = _first(problems) or (Problem("PoolMissing", ", ".join(missing)) if missing else None)
    if all(case.member.spec is not None and case.member.spec.template for case in cases) and cases:
        template_problem = None
    active = None if scaled else Problem("NothingScales", "no member is in an enabled group")
    return (
        _condition(env, CONDITION_READY, ready, "MembersReady"),
        _condition(env, CONDITION_TEMPLATE, template_problem, "TemplateFound"),
        _condition(env, CONDITION_AUTOSCALING, active, "Scaling"),
        _condition(env, CONDITION_ADMITTED, _first(refusals), "AsAsked"),
    )


def _first(found: list[tuple[str, Problem]]) -> Problem | None:
    """Take several problems as one: the first's reason, everybody's words."""
    if not found:
        return None
    words = "; ".join(f"{name}: {problem.message}" for name, problem in found)
    return Problem(found[0][1].reason, words)


def _condition(env: SandboxEnv, kind: str, problem: Problem | None, good: str) -> Condition:
    return Condition(
        type=kind,
        status=ConditionStatus.TRUE if problem is None else ConditionStatus.FALSE,
        reason=good if problem is None else problem.reason,
        message="" if problem is None else problem.message,
        observed_generation=env.metadata.generation,
    )
