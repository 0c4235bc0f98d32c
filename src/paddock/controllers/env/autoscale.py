"""How large each member of a scaling group should be: a pure decision over one snapshot.

Growing is led by demand: claims that wait and will not be served by what is there or in the
making are answered at once; what is made on speculation (the warm buffer) waits for the cooldown
and stays under the policy's ceiling. Shrinking is slow on purpose: only after the stabilisation
time, only what has been idle for long, in steps, announced first, and called off by a claim.
Floors (member, group, schedule, forecast) and ceilings (member, group) frame both.
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
"""Between announcing a smaller size and making it so; a claim meanwhile calls it off."""


class Action(StrEnum):
    """What becomes of a member."""

    HOLD = "Hold"
    GROW = "ScaleUp"
    DRAIN = "ScaleDownStarted"
    SHRINK = "ScaleDownCompleted"
    ABORT = "ScaleDownAborted"


class Member(Struct, frozen=True, kw_only=True):
    """One member at the instant of the snapshot."""

    name: str
    replicas: int
    """Its size now: running, idle and in the making."""
    idle: int = 0
    running: int = 0
    idle_ages: tuple[float, ...] = ()
    """Seconds that each idle one has been so, oldest first."""
    queue: int = 0
    """What waits for a sandbox of this member and no other; the group's queue counts it too."""
    minimum: int = 0
    maximum: int | None = None
    priority: int = 0
    up_priority: int = 0
    down_priority: int = 0
    state: AutoscalingState = AutoscalingState()

    @property
    def size(self) -> int:
        """What it holds or is about to hold, whichever is more."""
        return max(self.replicas, self.running + self.idle)

    @property
    def coming(self) -> int:
        """Idle and in the making: what can serve claims without growing."""
        return self.size - self.running


class Group(Struct, frozen=True, kw_only=True):
    """One scaling group at one instant."""

    policy: ScalingGroup
    members: tuple[Member, ...]
    now: datetime
    queue: int = 0
    """Claims that wait for a sandbox of this group."""

    @property
    def floor(self) -> int:
        """At least so many in all now: by its own minimum, its schedules and its forecast."""
        expected = 0
        if self.policy.forecast.enabled:
            rate = sum(member.state.claim_rate for member in self.members)
            lead = self.policy.forecast.lead_seconds
            soon = forecast(rate, lead_seconds=lead)
            expected = sum(member.running for member in self.members) + soon if soon else 0
        fixed = max(self.policy.min_replicas, scheduled_floor(self.policy.schedules, self.now))
        return max(fixed, expected)


class Decision(Struct, frozen=True, kw_only=True):
    """What one member should do, and why."""

    name: str
    action: Action
    target: int
    state: AutoscalingState
    sentence: str


def decide(group: Group) -> tuple[Decision, ...]:
    """Decide for every member of a group; ceilings of the group hold for the whole outcome."""
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
    is_calm = group.queue == 0 and all(d.action is Action.HOLD for d in decisions.values())
    drains = False
    for member in sorted(group.members, key=_shrinks_first):
        decision = decisions[member.name]
        if decision.action is not Action.HOLD or decision.target < member.replicas:
            continue
        # One member at a time: another that drains beside it could take the group below its floor.
        step = _shrink(group, member, decision, floors[member.name], sizes, may=not drains)
        if not is_calm:
            step = _abort(member, decision, "claims wait again")
        drains = drains or step.action in (Action.DRAIN, Action.SHRINK) or _is_draining(step.state)
        decisions[member.name] = step
        sizes[member.name] = step.target
    return tuple(decisions[member.name] for member in group.members)


def assign(group: Group) -> dict[str, int]:
    """Say which waiting claims each member counts: its own, then who has some, then can grow."""
    assigned = {member.name: member.queue for member in group.members}
    left = max(group.queue - sum(assigned.values()), 0)
    in_order = sorted(group.members, key=_grows_first)
    for member in in_order:
        take = min(left, max(member.coming - member.queue, 0))
        assigned[member.name] += take
        left -= take
    grown = {member.name: _grown_for_its_own(group, member) for member in group.members}
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


def _floors(group: Group) -> dict[str, int]:
    """Share the group's floor out over what its members keep anyway."""
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
    group: Group, member: Member, *, queue: int, floor: int, others: int, speculates: bool
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
        # Idle ones go at once; what runs is left to end.
        lowered = max(limit, min(member.running, member.replicas))
        if lowered < member.replicas:
            return _changed(member, Action.SHRINK, lowered, state, now, "its limit was lowered")
    target = max(_at_most(target, limit), member.replicas)
    if target <= member.replicas:
        reason = "demand is met" if not unmet else _why_not(member, policy.max_replicas)
        return _hold(member, state, reason)
    if state.saturated_until is not None and state.saturated_until > now:
        return _hold(member, state, "growing was refused a while ago; it is tried again later")
    reason = _why(unmet, target - member.replicas - unmet, floor >= target, member)
    return _changed(member, Action.GROW, target, state, now, reason)


def _limit(member: Member, group_maximum: int | None, others: int) -> int | None:
    if group_maximum is None:
        return member.maximum
    return _at_most(max(group_maximum - others, 0), member.maximum)


def _why(unmet: int, beyond: int, is_floor: bool, member: Member) -> str:
    if unmet:
        warm = f", and {beyond} more to stay warm" if beyond > 0 else ""
        return f"{_count(unmet, 'claim')} cannot be served by what is there{warm}"
    if is_floor:
        return f"its floor now is more than {member.replicas}"
    return "none has been idle for a while, and claims keep coming"


def _why_not(member: Member, group_maximum: int | None) -> str:
    if member.maximum is not None and member.replicas >= member.maximum:
        return f"claims wait, but it is at its maximum of {member.maximum}"
    if group_maximum is not None:
        return f"claims wait, but its group is at its maximum of {group_maximum}"
    return "claims wait for what is in the making"


def _is_proactive(group: Group, state: AutoscalingState) -> bool:
    policy, now = group.policy, group.now
    if state.idle_zero_since is None or state.last_claim_time is None:
        return False
    quiet = now - state.last_claim_time
    return _is_past(state.idle_zero_since, policy.idle_threshold_seconds, now) and (
        quiet <= timedelta(seconds=policy.idle_zero_quiet_window_seconds)
    )


# ---- shrinking -------------------------------------------------------------------------------


def _shrink(
    group: Group,
    member: Member,
    held: Decision,
    floor: int,
    sizes: dict[str, int],
    *,
    may: bool,
) -> Decision:
    state = held.state
    since = state.drain_since
    if since is not None and state.last_claim_time is not None and state.last_claim_time > since:
        return _abort(member, held, "one was claimed meanwhile")
    target = _smaller(group, member, state, floor, sizes) if may else member.replicas
    if target >= member.replicas:
        return _abort(member, held, "there is nothing left to let go")
    if state.drain_since is None:
        state = structs.replace(state, drain_since=group.now, drain_target=target)
        gone = member.replicas - target
        sentence = f"lets {gone} of {member.replicas} go soon: long idle, and nothing waits"
        return Decision(
            name=member.name,
            action=Action.DRAIN,
            target=member.replicas,
            state=structs.replace(state, message=sentence),
            sentence=sentence,
        )
    if not _is_past(state.drain_since, PROTECTION_SECONDS, group.now):
        return _hold(member, state, state.message)
    aimed = max(target, state.drain_target or 0)
    reason = f"{_count(member.replicas - aimed, 'sandbox', 'es')} had long been idle"
    return _changed(member, Action.SHRINK, aimed, state, group.now, reason)


def _smaller(
    group: Group, member: Member, state: AutoscalingState, floor: int, sizes: dict[str, int]
) -> int:
    """Give the size that is left when all gates are open; the present one where one is shut."""
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


def _has_claims(group: Group, state: AutoscalingState) -> bool:
    if state.last_claim_time is None:
        return False
    window = timedelta(seconds=group.policy.idle_zero_quiet_window_seconds)
    return group.now - state.last_claim_time <= window


def _abort(member: Member, held: Decision, reason: str) -> Decision:
    if not _is_draining(held.state):
        return held
    sentence = f"keeps its {member.replicas}: {reason}"
    state = structs.replace(held.state, drain_since=None, drain_target=None, message=sentence)
    return structs.replace(held, action=Action.ABORT, state=state, sentence=sentence)


# ---- small parts -----------------------------------------------------------------------------


def _observed(member: Member, now: datetime) -> AutoscalingState:
    """Note since when nothing is idle."""
    since = member.state.idle_zero_since
    if member.idle:
        since = None
    elif since is None:
        since = now
    return structs.replace(member.state, idle_zero_since=since)


def _changed(
    member: Member, action: Action, target: int, state: AutoscalingState, now: datetime, why: str
) -> Decision:
    verb = "grows" if action is Action.GROW else "shrinks"
    sentence = f"{verb} from {member.replicas} to {target}: {why}"
    state = structs.replace(state, message=sentence, drain_since=None, drain_target=None)
    if action is Action.GROW:
        state = structs.replace(state, last_scale_up_time=now)
    else:
        state = structs.replace(state, last_scale_down_time=now)
    return Decision(name=member.name, action=action, target=target, state=state, sentence=sentence)


def _hold(member: Member, state: AutoscalingState, why: str) -> Decision:
    return Decision(
        name=member.name, action=Action.HOLD, target=member.replicas, state=state, sentence=why
    )


def _may_grow(group: Group, member: Member) -> bool:
    until = member.state.saturated_until
    return _member_room(member) > 0 and (until is None or until <= group.now)


def _grown_for_its_own(group: Group, member: Member) -> int:
    """Say how much it grows for what waits for it alone: not beyond itself, nor while refused."""
    wanted = max(member.queue - member.coming, 0)
    return min(wanted, _member_room(member)) if _may_grow(group, member) else 0


def _member_room(member: Member) -> int:
    return 1 << 30 if member.maximum is None else max(member.maximum - member.size, 0)


def _group_room(group: Group, size: int) -> int:
    limit = group.policy.max_replicas
    return 1 << 30 if limit is None else max(limit - size, 0)


def _is_draining(state: AutoscalingState) -> bool:
    return state.drain_since is not None


def _is_past(moment: datetime | None, seconds: float, now: datetime) -> bool:
    return moment is None or now - moment >= timedelta(seconds=seconds)


def _at_most(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)


def _grows_first(member: Member) -> tuple[int, int, str]:
    return (member.up_priority, member.priority, member.name)


def _shrinks_first(member: Member) -> tuple[int, int, str]:
    return (-member.down_priority, -member.priority, member.name)


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{plural}"
