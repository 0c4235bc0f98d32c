"""Decides the size of each member of a scaling group from one snapshot. Pure.

Demand drives growth: waiting claims that existing and starting sandboxes will not serve are met at
once. The warm buffer is speculative: it waits for the cooldown and stays below the policy's
ceiling. Shrinking is slow on purpose: only after the stabilization time, only long-idle sandboxes,
in steps, announced first, and aborted by a claim. Floors (member, group, schedule, forecast) and
ceilings (member, group) bound both.
"""

from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct, structs

from paddock.controllers.env.formulas import (
    ceiling,
    forecast,
    scheduled_floor,
    shrink_step,
    warm_buffer,
)
from paddock.resources.kinds.env import ScalingGroup
from paddock.resources.kinds.pool import AutoscalingState

PROTECTION_SECONDS = 10.0
"""Time between announcing a smaller size and applying it; a claim aborts it."""


class ScalingAction(StrEnum):
    """The action for one member."""

    HOLD = "Hold"
    GROW = "ScaleUp"
    DRAIN = "ScaleDownStarted"
    SHRINK = "ScaleDownCompleted"
    ABORT = "ScaleDownAborted"


class ScaledMember(Struct, frozen=True, kw_only=True):
    """One member at the time of the snapshot."""

    name: str
    replicas: int
    """Its current size: running, idle and starting."""
    idle: int = 0
    running: int = 0
    idle_ages: tuple[float, ...] = ()
    """Seconds for which each idle sandbox has been idle, oldest first."""
    queue: int = 0
    """Demand for this member only; the group's queue includes it."""
    minimum: int = 0
    maximum: int | None = None
    priority: int = 0
    up_priority: int = 0
    down_priority: int = 0
    state: AutoscalingState = AutoscalingState()

    @property
    def size(self) -> int:
        """The larger of its desired size and what it holds."""
        return max(self.replicas, self.running + self.idle)

    @property
    def coming(self) -> int:
        """Idle and starting: what can serve claims without growth."""
        return self.size - self.running


class ScaledGroup(Struct, frozen=True, kw_only=True):
    """One scaling group at the time of the snapshot."""

    policy: ScalingGroup
    members: tuple[ScaledMember, ...]
    now: datetime
    queue: int = 0
    """Claims that wait for this group."""

    @property
    def floor(self) -> int:
        """Minimum total size now, from minReplicas, schedules and the forecast."""
        expected = 0
        if self.policy.forecast.enabled:
            rate = sum(member.state.claim_rate for member in self.members)
            lead = self.policy.forecast.lead_seconds
            soon = forecast(rate, lead_seconds=lead)
            expected = sum(member.running for member in self.members) + soon if soon else 0
        fixed = max(self.policy.min_replicas, scheduled_floor(self.policy.schedules, self.now))
        return max(fixed, expected)


class Decision(Struct, frozen=True, kw_only=True):
    """The decision for one member, and its reason."""

    name: str
    action: ScalingAction
    target: int
    state: AutoscalingState
    sentence: str


def decide(group: ScaledGroup) -> tuple[Decision, ...]:
    """Return a decision for every member; the group's ceiling holds for the sum."""
    waiting = assign(group)
    floors = _floors(group)
    sizes = {member.name: member.replicas for member in group.members}
    decisions: dict[str, Decision] = {}
    in_order = sorted(group.members, key=_grows_first)
    speculates = next((item.name for item in in_order if _may_grow(group, item)), "")
    for member in in_order:
        others = sum(size for name, size in sizes.items() if name != member.name)
        decision = _grow(
            group,
            member,
            queue=waiting[member.name],
            floor=floors[member.name],
            others=others,
            speculates=member.name == speculates,
        )
        decisions[member.name] = decision
        sizes[member.name] = decision.target
    is_calm = group.queue == 0 and all(d.action is ScalingAction.HOLD for d in decisions.values())
    drains = False
    for member in sorted(group.members, key=_shrinks_first):
        decision = decisions[member.name]
        if decision.action is not ScalingAction.HOLD or decision.target < member.replicas:
            continue
        # One member at a time: two draining members could take the group below its floor.
        step = _shrink(group, member, decision, floors[member.name], sizes, may=not drains)
        if not is_calm:
            step = _abort(member, decision, "claims wait again")
        drains = (
            drains
            or step.action in (ScalingAction.DRAIN, ScalingAction.SHRINK)
            or _is_draining(step.state)
        )
        decisions[member.name] = step
        sizes[member.name] = step.target
    return tuple(decisions[member.name] for member in group.members)


def assign(group: ScaledGroup) -> dict[str, int]:
    """Divide waiting claims among members: own queue, then spare sandboxes, then growth."""
    assigned = {member.name: member.queue for member in group.members}
    left = max(group.queue - sum(assigned.values()), 0)
    in_order = sorted(group.members, key=_grows_first)
    for member in in_order:
        take = min(left, max(member.coming - member.queue, 0))
        assigned[member.name] += take
        left -= take
    grown = {member.name: _growth_for_own_queue(group, member) for member in group.members}
    size = sum(member.size + grown[member.name] for member in group.members)
    room = _group_room(group, size)
    for member in in_order:
        if not _may_grow(group, member):
            continue
        take = min(left, max(_member_room(member) - grown[member.name], 0), room)
        assigned[member.name] += take
        left -= take
        room -= take
    if left and in_order:
        assigned[in_order[0].name] += left
    return assigned


def _floors(group: ScaledGroup) -> dict[str, int]:
    """Divide the group's floor among its members, above their current sizes."""
    floors = {member.name: _at_most(member.minimum, member.maximum) for member in group.members}
    short = _at_most(group.floor, group.policy.max_replicas)
    short -= sum(max(floors[item.name], item.replicas) for item in group.members)
    for member in sorted(group.members, key=_grows_first):
        if short <= 0:
            break
        if not _may_grow(group, member):
            continue
        base = max(floors[member.name], member.replicas)
        lifted = _at_most(base + short, member.maximum)
        short -= max(lifted - base, 0)
        floors[member.name] = max(lifted, floors[member.name])
    return floors


# ---- growing ---------------------------------------------------------------------------------


def _grow(
    group: ScaledGroup,
    member: ScaledMember,
    *,
    queue: int,
    floor: int,
    others: int,
    speculates: bool,
) -> Decision:
    policy, now = group.policy, group.now
    state = _observed(member, now)
    size, demand = member.size, member.running + queue
    unmet = max(queue - member.coming, 0)
    spare = max(member.coming - queue, 0)
    is_ripe = unmet > 0 or _is_proactive(group, state)
    warmth = 0
    if speculates and is_ripe and _is_past(state.last_scale_up_time, policy.cooldown_seconds, now):
        missing = warm_buffer(policy.scale_up_policy, demand) - spare
        warmth = min(max(missing, 0), max(size, 1))
    highest = ceiling(policy.scale_up_policy, demand)
    target = min(size + unmet + warmth, max(highest, size)) if unmet or warmth else member.replicas
    target = max(target, floor)
    limit = _limit(member, policy.max_replicas, others)
    if limit is not None and limit < member.replicas:
        # Idle sandboxes are deleted at once; running ones end by themselves.
        lowered = max(limit, min(member.running, member.replicas))
        if lowered < member.replicas:
            return _changed(
                member, ScalingAction.SHRINK, lowered, state, now, "its maximum was lowered"
            )
    target = max(_at_most(target, limit), member.replicas)
    if target <= member.replicas:
        reason = "demand is met" if not unmet else _why_not(member, policy.max_replicas)
        return _hold(member, state, reason)
    if state.saturated_until is not None and state.saturated_until > now:
        return _hold(member, state, "growth was refused; it is retried after the cooldown")
    reason = _why(unmet, target - member.replicas - unmet, floor >= target, member)
    return _changed(member, ScalingAction.GROW, target, state, now, reason)


def _limit(member: ScaledMember, group_maximum: int | None, others: int) -> int | None:
    if group_maximum is None:
        return member.maximum
    return _at_most(max(group_maximum - others, 0), member.maximum)


def _why(unmet: int, beyond: int, is_floor: bool, member: ScaledMember) -> str:
    if unmet:
        warm = f", plus {beyond} for the warm buffer" if beyond > 0 else ""
        return f"{_count(unmet, 'claim')} cannot be served by existing sandboxes{warm}"
    if is_floor:
        return f"its minimum is now above {member.replicas}"
    return "no sandbox has been idle for a while, and claims keep arriving"


def _why_not(member: ScaledMember, group_maximum: int | None) -> str:
    if member.maximum is not None and member.replicas >= member.maximum:
        return f"claims wait, but it is at its maximum of {member.maximum}"
    if group_maximum is not None:
        return f"claims wait, but its group is at its maximum of {group_maximum}"
    return "claims wait for sandboxes that are starting"


def _is_proactive(group: ScaledGroup, state: AutoscalingState) -> bool:
    policy, now = group.policy, group.now
    if state.idle_zero_since is None or state.last_claim_time is None:
        return False
    quiet = now - state.last_claim_time
    return _is_past(state.idle_zero_since, policy.idle_threshold_seconds, now) and (
        quiet <= timedelta(seconds=policy.idle_zero_quiet_window_seconds)
    )


# ---- shrinking -------------------------------------------------------------------------------


def _shrink(
    group: ScaledGroup,
    member: ScaledMember,
    held: Decision,
    floor: int,
    sizes: dict[str, int],
    *,
    may: bool,
) -> Decision:
    state = held.state
    since = state.drain_since
    if since is not None and state.last_claim_time is not None and state.last_claim_time > since:
        return _abort(member, held, "a sandbox was claimed")
    target = _smaller(group, member, state, floor, sizes) if may else member.replicas
    if target >= member.replicas:
        return _abort(member, held, "nothing is left to remove")
    if state.drain_since is None:
        state = structs.replace(state, drain_since=group.now, drain_target=target)
        gone = member.replicas - target
        sentence = f"removes {gone} of {member.replicas} soon: idle for long, and no claim waits"
        return Decision(
            name=member.name,
            action=ScalingAction.DRAIN,
            target=member.replicas,
            state=structs.replace(state, message=sentence),
            sentence=sentence,
        )
    if not _is_past(state.drain_since, PROTECTION_SECONDS, group.now):
        return _hold(member, state, state.message)
    aimed = max(target, state.drain_target or 0)
    reason = f"{_count(member.replicas - aimed, 'sandbox', 'es')} had been idle for long"
    return _changed(member, ScalingAction.SHRINK, aimed, state, group.now, reason)


def _smaller(
    group: ScaledGroup,
    member: ScaledMember,
    state: AutoscalingState,
    floor: int,
    sizes: dict[str, int],
) -> int:
    """Return the size after one step of shrinking; the current size if not allowed yet."""
    policy, now = group.policy, group.now
    for moment in (state.last_scale_up_time, state.last_scale_down_time):
        if not _is_past(moment, policy.stabilization_seconds, now):
            return member.replicas
    eligible = sum(age >= policy.idle_timeout_seconds for age in member.idle_ages)
    step = min(shrink_step(policy.scale_down_policy, member.replicas), eligible)
    lowest = max(floor, member.minimum, member.running)
    if _has_claims(group, state):
        lowest = max(lowest, member.running + warm_buffer(policy.scale_up_policy, member.running))
    others = sum(size for name, size in sizes.items() if name != member.name)
    lowest = max(lowest, group.floor - others)
    return max(member.replicas - step, min(lowest, member.replicas))


def _has_claims(group: ScaledGroup, state: AutoscalingState) -> bool:
    if state.last_claim_time is None:
        return False
    window = timedelta(seconds=group.policy.idle_zero_quiet_window_seconds)
    return group.now - state.last_claim_time <= window


def _abort(member: ScaledMember, held: Decision, reason: str) -> Decision:
    if not _is_draining(held.state):
        return held
    sentence = f"keeps its {member.replicas}: {reason}"
    state = structs.replace(held.state, drain_since=None, drain_target=None, message=sentence)
    return structs.replace(held, action=ScalingAction.ABORT, state=state, sentence=sentence)


# ---- small parts -----------------------------------------------------------------------------


def _observed(member: ScaledMember, now: datetime) -> AutoscalingState:
    """Update the time since when no sandbox is idle."""
    since = member.state.idle_zero_since
    if member.idle:
        since = None
    elif since is None:
        since = now
    return structs.replace(member.state, idle_zero_since=since)


def _changed(
    member: ScaledMember,
    action: ScalingAction,
    target: int,
    state: AutoscalingState,
    now: datetime,
    why: str,
) -> Decision:
    verb = "grows" if action is ScalingAction.GROW else "shrinks"
    sentence = f"{verb} from {member.replicas} to {target}: {why}"
    state = structs.replace(state, message=sentence, drain_since=None, drain_target=None)
    if action is ScalingAction.GROW:
        state = structs.replace(state, last_scale_up_time=now)
    else:
        state = structs.replace(state, last_scale_down_time=now)
    return Decision(name=member.name, action=action, target=target, state=state, sentence=sentence)


def _hold(member: ScaledMember, state: AutoscalingState, why: str) -> Decision:
    return Decision(
        name=member.name,
        action=ScalingAction.HOLD,
        target=member.replicas,
        state=state,
        sentence=why,
    )


def _may_grow(group: ScaledGroup, member: ScaledMember) -> bool:
    until = member.state.saturated_until
    return _member_room(member) > 0 and (until is None or until <= group.now)


def _growth_for_own_queue(group: ScaledGroup, member: ScaledMember) -> int:
    """Return its growth for its own queue, within its room, 0 during a cooldown."""
    wanted = max(member.queue - member.coming, 0)
    return min(wanted, _member_room(member)) if _may_grow(group, member) else 0


def _member_room(member: ScaledMember) -> int:
    return 1 << 30 if member.maximum is None else max(member.maximum - member.size, 0)


def _group_room(group: ScaledGroup, size: int) -> int:
    limit = group.policy.max_replicas
    return 1 << 30 if limit is None else max(limit - size, 0)


def _is_draining(state: AutoscalingState) -> bool:
    return state.drain_since is not None


def _is_past(moment: datetime | None, seconds: float, now: datetime) -> bool:
    return moment is None or now - moment >= timedelta(seconds=seconds)


def _at_most(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)


def _grows_first(member: ScaledMember) -> tuple[int, int, str]:
    return (member.up_priority, member.priority, member.name)


def _shrinks_first(member: ScaledMember) -> tuple[int, int, str]:
    return (-member.down_priority, -member.priority, member.name)


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{plural}"
