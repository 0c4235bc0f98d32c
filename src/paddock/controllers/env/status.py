"""The status of an environment and the snapshot for its router, from member runs. Pure.

Only this cluster's segment is written; segments of other clusters are kept.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.environments import EnvSnapshot, MemberSnapshot
from paddock.controllers.env.member_reconcile import MemberProblem, MemberReconcile
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
"""An unchanged snapshot gets a new time this often."""


def headrooms(runs: Sequence[MemberReconcile]) -> dict[str, int | None]:
    """Return how much each member may grow; `None` means unlimited, 0 if it does not scale."""
    sizes: dict[str, int] = {}
    for run in runs:
        group = run.member.config.scaling_group
        sizes[group] = sizes.get(group, 0) + max(run.granted, run.running)
    found: dict[str, int | None] = {}
    for run in runs:
        if not run.is_scaled or run.group is None or run.problem is not None:
            found[run.name] = 0
            continue
        rooms: list[int] = []
        if run.member.config.max_replicas is not None:
            rooms.append(run.member.config.max_replicas - run.granted)
        if run.group.max_replicas is not None:
            rooms.append(run.group.max_replicas - sizes[run.member.config.scaling_group])
        found[run.name] = max(min(rooms), 0) if rooms else None
    return found


def snapshot(
    env: SandboxEnv, runs: Sequence[MemberReconcile], *, cluster: str, now: datetime
) -> EnvSnapshot:
    """Return the snapshot for the claim queue."""
    rooms = headrooms(runs)
    return EnvSnapshot(
        env=env.key,
        cluster=cluster,
        taken_at=now,
        members=tuple(
            MemberSnapshot(
                name=run.name,
                pool=run.key,
                priority=run.member.config.priority,
                scaling_group=run.member.config.scaling_group,
                idle=run.idle,
                pending=max(run.granted - run.running - run.idle, 0),
                headroom=rooms[run.name],
                saturated_until=run.state.saturated_until,
            )
            for run in runs
            if run.pool is not None
        ),
    )


def aggregate(
    env: SandboxEnv,
    runs: Sequence[MemberReconcile],
    *,
    cluster: str,
    waiting: int,
    template_problem: MemberProblem | None,
    now: datetime,
) -> SandboxEnvStatus:
    """Return the status of the environment."""
    rooms = headrooms(runs)
    local = ObservedCluster(
        cluster_id=cluster,
        is_local=True,
        last_snapshot_time=now,
        observed_members=tuple(_observed(run, rooms[run.name], now) for run in runs),
    )
    before = next((item for item in env.status.clusters if item.cluster_id == cluster), None)
    if before is not None and _is_fresh(before, local, now):
        local = before
    clusters = (*(item for item in env.status.clusters if item.cluster_id != cluster), local)
    members = [member for item in clusters for member in item.observed_members]
    conditions = env.status.conditions
    for new in _conditions(env, runs, template_problem):
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


def only_counts_changed(old: SandboxEnvStatus, new: SandboxEnvStatus) -> bool:
    """Whether only counts changed, whose write can be delayed."""
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


def _is_fresh(before: ObservedCluster, current: ObservedCluster, now: datetime) -> bool:
    same = structs.replace(before, last_snapshot_time=None) == structs.replace(
        current, last_snapshot_time=None
    )
    snapshot_time = before.last_snapshot_time
    return (
        same
        and snapshot_time is not None
        and now - snapshot_time < timedelta(seconds=SNAPSHOT_SECONDS)
    )


def _observed(run: MemberReconcile, headroom: int | None, now: datetime) -> ObservedMember:
    pool = run.pool
    template = pool.spec.template if pool is not None else None
    until = run.state.saturated_until
    problem = run.problem or run.refusal
    return ObservedMember(
        name=run.name,
        pool=run.key.name if pool is not None else "",
        state=_state(run, headroom, now),
        idle=run.idle,
        running=run.running,
        pending=run.pending,
        desired=run.granted,
        current=run.idle + run.running + run.pending,
        saturated_until=until if until is not None and until > now else None,
        scale_up_headroom=headroom,
        scaling_group=run.member.config.scaling_group,
        autoscaling_enabled=run.is_scaled,
        priority=run.member.config.priority,
        effective_resources=template.resources if template is not None else Resources(),
        revision=pool.status.revision if pool is not None else "",
        updated=pool.status.updated if pool is not None else 0,
        message=problem.message if problem is not None else run.state.message,
    )


def _state(run: MemberReconcile, headroom: int | None, now: datetime) -> MemberState:
    if run.problem is not None:
        return MemberState.INCONSISTENT
    if run.pool is None:
        return MemberState.MISSING
    until = run.state.saturated_until
    is_full = headroom == 0 and not run.idle and not run.pending and run.granted > 0
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
    env: SandboxEnv, runs: Sequence[MemberReconcile], template_problem: MemberProblem | None
) -> tuple[Condition, ...]:
    problems = [(run.name, run.problem) for run in runs if run.problem is not None]
    refusals = [(run.name, run.refusal) for run in runs if run.refusal is not None]
    missing = [run.name for run in runs if run.pool is None and run.problem is None]
    scaled = [run.name for run in runs if run.is_scaled]
    ready = _first(problems) or (
        MemberProblem("PoolMissing", ", ".join(missing)) if missing else None
    )
    if all(run.member.spec is not None and run.member.spec.template for run in runs) and runs:
        template_problem = None
    active = None if scaled else MemberProblem("NothingScales", "no member is in an enabled group")
    return (
        _condition(env, CONDITION_READY, ready, "MembersReady"),
        _condition(env, CONDITION_TEMPLATE, template_problem, "TemplateFound"),
        _condition(env, CONDITION_AUTOSCALING, active, "Scaling"),
        _condition(env, CONDITION_ADMITTED, _first(refusals), "AsAsked"),
    )


def _first(found: list[tuple[str, MemberProblem]]) -> MemberProblem | None:
    """Merge problems: the reason of the first, the messages of all."""
    if not found:
        return None
    message = "; ".join(f"{name}: {problem.message}" for name, problem in found)
    return MemberProblem(found[0][1].reason, message)


def _condition(env: SandboxEnv, kind: str, problem: MemberProblem | None, good: str) -> Condition:
    return Condition(
        type=kind,
        status=ConditionStatus.TRUE if problem is None else ConditionStatus.FALSE,
        reason=good if problem is None else problem.reason,
        message="" if problem is None else problem.message,
        observed_generation=env.metadata.generation,
    )
