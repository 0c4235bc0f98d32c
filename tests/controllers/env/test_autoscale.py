"""The autoscaler's decisions: rule by rule, then as properties of any demand."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from paddock.controllers.env.autoscale import (
    PROTECTION_SECONDS,
    Decision,
    ScaledGroup,
    ScaledMember,
    ScalingAction,
    assign,
    decide,
)
from paddock.controllers.env.formulas import (
    ceiling,
    decayed_rate,
    forecast,
    is_open,
    scheduled_floor,
    shrink_step,
    warm_buffer,
)
from paddock.controllers.env.simulation import Scenario, Simulation, SimulationResult, TraceClaim
from paddock.resources.kinds.env import Forecast, ScalePolicy, ScalingGroup, ScheduledFloor
from paddock.resources.kinds.pool import AutoscalingState

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


SATURATED = AutoscalingState(saturated_until=ago(-9))


def one(group: ScalingGroup | None = None, *, queue: int = 0, **member) -> Decision:
    subject = ScaledMember(name="pool", **member)
    (decision,) = decide(
        ScaledGroup(policy=group or ScalingGroup(), members=(subject,), now=NOW, queue=queue)
    )
    return decision


# ---- growing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "buffer", "highest", "step"),
    [
        (ScalePolicy.CONSERVATIVE, 1, 11, 1),
        (ScalePolicy.DEFAULT, 3, 16, 3),
        (ScalePolicy.AGGRESSIVE, 5, 22, 5),
    ],
)
def test_the_formulas_are_those_of_each_policy(policy, buffer, highest, step) -> None:
    assert warm_buffer(policy, 10) == buffer
    assert ceiling(policy, 10) == highest
    assert shrink_step(policy, 10) == step


def test_waiting_claims_grow_a_pool_at_once_even_during_the_cooldown() -> None:
    decision = one(
        queue=3,
        replicas=4,
        running=4,
        state=AutoscalingState(last_scale_up_time=ago(1)),
    )
    assert decision.action is ScalingAction.GROW
    assert decision.target == 7
    assert "3 claims" in decision.sentence


def test_after_the_cooldown_the_warm_buffer_is_added() -> None:
    decision = one(queue=3, replicas=4, running=4)
    assert decision.target == 4 + 3 + warm_buffer(ScalePolicy.DEFAULT, 7)
    assert decision.state.last_scale_up_time == NOW


def test_starting_sandboxes_count_for_waiting_claims() -> None:
    assert one(queue=3, replicas=8, running=4, idle=0).action is ScalingAction.HOLD


def test_growth_does_not_compound_while_sandboxes_start() -> None:
    size = 0
    for second in range(600):
        state = AutoscalingState(idle_zero_since=ago(600), last_claim_time=NOW)
        decision = one(queue=12, replicas=size, running=0, state=state)
        size = decision.target
        assert size <= ceiling(ScalePolicy.DEFAULT, 12), second


def test_an_empty_stock_with_recent_claims_is_refilled_in_advance() -> None:
    state = AutoscalingState(idle_zero_since=ago(31), last_claim_time=ago(100))
    decision = one(replicas=4, running=4, state=state)
    assert (decision.action, decision.target) == (ScalingAction.GROW, 5)


@pytest.mark.parametrize(
    "state",
    [
        AutoscalingState(idle_zero_since=ago(29), last_claim_time=ago(10)),
        AutoscalingState(idle_zero_since=ago(31), last_claim_time=ago(301)),
        AutoscalingState(
            idle_zero_since=ago(31), last_claim_time=ago(10), last_scale_up_time=ago(29)
        ),
        AutoscalingState(idle_zero_since=ago(31), last_claim_time=ago(10), saturated_until=ago(-5)),
    ],
    ids=["not for long", "no claims of late", "cooling down", "saturated"],
)
def test_the_warm_buffer_waits_for_its_conditions(state: AutoscalingState) -> None:
    assert one(replicas=4, running=4, state=state).action is ScalingAction.HOLD


def test_a_saturated_pool_is_not_retried_before_its_cooldown() -> None:
    decision = one(queue=5, replicas=2, running=2, state=AutoscalingState(saturated_until=ago(-1)))
    assert decision.action is ScalingAction.HOLD
    again = one(queue=5, replicas=2, running=2, state=AutoscalingState(saturated_until=ago(0)))
    assert again.action is ScalingAction.GROW


def test_ceilings_of_member_and_group_hold() -> None:
    assert one(queue=50, replicas=2, running=2, maximum=9).target == 9
    assert one(ScalingGroup(max_replicas=6), queue=50, replicas=2, running=2).target == 6
    lowered = one(replicas=9, running=2, idle=7, maximum=5)
    assert (lowered.action, lowered.target) == (ScalingAction.SHRINK, 5)


def test_a_pool_that_runs_more_than_its_size_grows_from_what_runs() -> None:
    assert one(queue=3, replicas=2, running=5).target >= 8


def test_idle_zero_since_is_set_and_cleared() -> None:
    assert one(replicas=1, running=1).state.idle_zero_since == NOW
    kept = one(replicas=1, running=1, state=AutoscalingState(idle_zero_since=ago(5)))
    assert kept.state.idle_zero_since == ago(5)
    assert one(replicas=1, idle=1, state=kept.state).state.idle_zero_since is None


# ---- floors ----------------------------------------------------------------------------------


def test_floors_of_member_group_schedule_and_forecast() -> None:
    assert one(minimum=3, replicas=0).target == 3
    assert one(ScalingGroup(min_replicas=4), replicas=0).target == 4
    window = ScheduledFloor(cron="0 12 * * *", duration_seconds=3600, min_replicas=7)
    assert one(ScalingGroup(schedules=(window,)), replicas=0).target == 7
    busy = AutoscalingState(claim_rate=0.2)
    ahead = ScalingGroup(forecast=Forecast(enabled=True, lead_seconds=30))
    assert one(ahead, replicas=2, running=2, state=busy).target == 2 + 6
    assert one(replicas=2, running=2, state=busy).target == 2


@pytest.mark.parametrize(
    ("hour", "minute", "expected"), [(7, 59, 0), (8, 0, 5), (17, 59, 5), (18, 0, 0)]
)
def test_a_schedule_is_active_from_its_start_for_its_duration(hour, minute, expected) -> None:
    window = ScheduledFloor(cron="0 8 * * 1-5", duration_seconds=10 * 3600, min_replicas=5)
    tuesday = datetime(2030, 1, 1, hour, minute, tzinfo=UTC)
    assert scheduled_floor((window,), tuesday) == expected
    assert not is_open(window, tuesday.replace(day=5, hour=9))


def test_the_claim_rate_decays_to_zero() -> None:
    rate = decayed_rate(0.0, ago(10), 60, NOW, window_seconds=600)
    assert rate == pytest.approx(0.1)
    assert decayed_rate(rate, ago(600), 0, NOW, window_seconds=600) == pytest.approx(
        0.0368, abs=1e-3
    )
    assert decayed_rate(rate, ago(10_000), 0, NOW, window_seconds=600) == 0.0
    assert forecast(0.1, lead_seconds=30) == 3


# ---- shrinking -------------------------------------------------------------------------------

LONG_IDLE = (500.0,) * 8


def drained(state: AutoscalingState | None = None, **member) -> Decision:
    member.setdefault("replicas", 8)
    member.setdefault("idle", 8)
    member.setdefault("idle_ages", LONG_IDLE)
    return one(state=state or AutoscalingState(), **member)


def test_shrinking_is_announced_then_applied_unless_a_claim_arrives() -> None:
    started = drained()
    assert (started.action, started.target) == (ScalingAction.DRAIN, 8)
    assert started.state.drain_target == 6
    held = drained(started.state)
    assert held.action is ScalingAction.HOLD
    ripe = structs.replace(started.state, drain_since=ago(PROTECTION_SECONDS))
    done = drained(ripe)
    assert (done.action, done.target) == (ScalingAction.SHRINK, 6)
    assert done.state.last_scale_down_time == NOW
    assert done.state.drain_since is None
    claimed = structs.replace(ripe, last_claim_time=ago(1))
    aborted = drained(claimed)
    assert (aborted.action, aborted.target) == (ScalingAction.ABORT, 8)
    assert "claimed" in aborted.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"state": AutoscalingState(last_scale_down_time=ago(59))},
        {"state": AutoscalingState(last_scale_up_time=ago(59))},
        {"idle_ages": (299.0,) * 8},
        {"minimum": 8},
        {"idle": 0, "running": 8, "idle_ages": ()},
    ],
    ids=["shrank just now", "grew just now", "not idle for long", "at its floor", "all in use"],
)
def test_nothing_shrinks_while_a_condition_is_not_met(changes) -> None:
    assert drained(**changes).action is ScalingAction.HOLD


def test_a_group_floor_trims_the_step_and_one_member_drains_at_a_time() -> None:
    members = tuple(
        ScaledMember(
            name=name,
            replicas=4,
            idle=4,
            idle_ages=(500.0,) * 4,
            down_priority=priority,
        )
        for name, priority in (("keep", 0), ("shed", 5))
    )
    policy = ScalingGroup(min_replicas=7, scale_down_policy=ScalePolicy.AGGRESSIVE)
    keep, shed = decide(ScaledGroup(policy=policy, members=members, now=NOW))
    assert keep.action is ScalingAction.HOLD
    assert shed.action is ScalingAction.DRAIN
    assert shed.state.drain_target == 3


def test_groups_grow_by_priority_and_spill_over() -> None:
    members = (
        ScaledMember(name="b", replicas=0, up_priority=1),
        ScaledMember(name="a", replicas=0, up_priority=0, maximum=2),
    )
    group = ScaledGroup(policy=ScalingGroup(), members=members, now=NOW, queue=5)
    assert assign(group) == {"a": 2, "b": 3}
    b, a = decide(group)
    assert a.target == 2
    assert b.target == 3


def test_demand_for_one_member_grows_that_member_only() -> None:
    members = (
        ScaledMember(name="a", replicas=6, idle=6),
        ScaledMember(name="b", replicas=2, running=2, up_priority=9, queue=4),
        ScaledMember(name="c", replicas=1, running=1, maximum=1, queue=3),
    )
    group = ScaledGroup(policy=ScalingGroup(), members=members, now=NOW, queue=8)
    assert assign(group) == {"a": 1, "b": 4, "c": 3}
    a, b, c = decide(group)
    assert (a.target, c.target) == (6, 1)
    assert b.target >= 6


@pytest.mark.parametrize("state", [{"maximum": 10}, {"state": SATURATED}])
def test_demand_for_a_full_member_takes_no_room_from_its_siblings(state) -> None:
    members = (
        ScaledMember(name="a", replicas=10, running=10, queue=90, **state),
        ScaledMember(name="b", replicas=0),
    )
    group = ScaledGroup(policy=ScalingGroup(max_replicas=50), members=members, now=NOW, queue=95)
    a, b = decide(group)
    assert a.target == 10
    assert b.target >= 5


def test_a_saturated_sibling_does_not_hold_back_the_others() -> None:
    members = (
        ScaledMember(name="a", replicas=1, running=1, state=SATURATED),
        ScaledMember(name="b", replicas=0, up_priority=9),
    )
    a, b = decide(ScaledGroup(policy=ScalingGroup(), members=members, now=NOW, queue=2))
    assert a.target == 1
    assert b.target >= 2


# ---- for any demand --------------------------------------------------------------------------

policies = st.sampled_from(ScalePolicy)
traces = st.lists(
    st.builds(
        TraceClaim,
        st.floats(0, 2000, allow_nan=False).map(lambda value: round(value, 1)),
        st.floats(0, 900, allow_nan=False).map(lambda value: round(value, 1)),
    ),
    max_size=60,
)
groups = st.builds(
    ScalingGroup,
    scale_up_policy=policies,
    scale_down_policy=policies,
    min_replicas=st.integers(0, 5),
    max_replicas=st.one_of(st.none(), st.integers(5, 40)),
    cooldown_seconds=st.sampled_from((0, 30)),
    stabilization_seconds=st.sampled_from((30, 60, 300)),
    idle_timeout_seconds=st.sampled_from((0, 60, 300)),
    forecast=st.builds(Forecast, enabled=st.booleans()),
)
scenarios = st.builds(
    Scenario,
    group=groups,
    minimum=st.integers(0, 4),
    maximum=st.one_of(st.none(), st.integers(4, 30)),
    start_seconds=st.sampled_from((0.2, 2.0, 25.0)),
    settle_seconds=st.just(1500.0),
)


def limit_of(scenario: Scenario) -> int:
    limits = (scenario.maximum, scenario.group.max_replicas)
    return min((item for item in limits if item is not None), default=1 << 30)


@settings(max_examples=25, deadline=None)
@given(scenarios, traces)
def test_for_any_trace_sizes_stay_between_floors_and_ceilings(scenario, trace) -> None:
    outcome = Simulation(scenario, trace).run()
    limit = limit_of(scenario)
    for step in outcome.steps:
        target = step.decision.target
        assert target <= limit
        if target > step.before:
            highest = ceiling(scenario.group.scale_up_policy, step.demand)
            assert target <= max(highest, step.floor)
        assert target >= min(step.floor, limit)
        if target < step.before:
            assert target >= min(step.floor, limit)
    for sample in outcome.samples:
        assert sample.idle + sample.starting + sample.running <= max(
            sample.replicas, sample.running
        )


@settings(max_examples=25, deadline=None)
@given(scenarios, traces)
def test_for_any_trace_sizes_oscillate_no_faster_than_the_stabilization(scenario, trace) -> None:
    outcome = Simulation(scenario, trace).run()
    stabilization = scenario.group.stabilization_seconds
    moved_at: float | None = None
    for step in outcome.steps:
        if step.decision.target < step.before:
            assert moved_at is None or step.at - moved_at >= stabilization
        if step.decision.target != step.before:
            moved_at = step.at


@settings(max_examples=25, deadline=None)
@given(scenarios, traces)
def test_for_any_trace_unmet_demand_is_met_within_one_cooldown(scenario, trace) -> None:
    free = structs.replace(
        scenario, maximum=None, group=structs.replace(scenario.group, max_replicas=None)
    )
    outcome = Simulation(free, trace).run()
    assert outcome.unserved == 0
    patience = free.start_seconds + free.group.cooldown_seconds
    assert all(wait <= patience + 1e-6 for _, wait in outcome.waits)


@settings(max_examples=20, deadline=None)
@given(scenarios, traces, st.integers(1, 10))
def test_refused_growth_is_retried_after_the_cooldown_and_not_before(
    scenario, trace, capacity
) -> None:
    outcome: SimulationResult = Simulation(
        structs.replace(scenario, capacity=capacity), trace
    ).run()
    tried: float | None = None
    for step in outcome.steps:
        if step.decision.action is ScalingAction.GROW:
            assert tried is None or step.at - tried >= scenario.group.saturation_cooldown_seconds
            tried = step.at if step.decision.target > capacity else None


@settings(max_examples=15, deadline=None)
@given(scenarios, traces)
def test_without_demand_a_pool_returns_to_its_floor(scenario, trace) -> None:
    quiet = structs.replace(scenario, settle_seconds=60_000.0)
    outcome = Simulation(quiet, trace).run()
    last = outcome.samples[-1]
    assert last.running == last.queue == 0
    lowest = max(quiet.minimum, quiet.group.min_replicas)
    assert last.replicas == min(lowest, limit_of(quiet))


members = st.builds(
    ScaledMember,
    name=st.sampled_from("abcdef"),
    replicas=st.integers(0, 30),
    idle=st.integers(0, 10),
    running=st.integers(0, 20),
    minimum=st.integers(0, 5),
    maximum=st.one_of(st.none(), st.integers(5, 30)),
    up_priority=st.integers(0, 2),
    down_priority=st.integers(0, 2),
    queue=st.integers(0, 20),
)


@settings(max_examples=100, deadline=None)
@given(
    groups,
    st.lists(members, max_size=5, unique_by=lambda item: item.name),
    st.integers(0, 100),
)
def test_a_group_never_grows_beyond_its_maximum(policy, found, queue) -> None:
    queue += sum(item.queue for item in found)
    group = ScaledGroup(policy=policy, members=tuple(found), now=NOW, queue=queue)
    decisions = decide(group)
    assert sum(assign(group).values()) == (queue if found else 0)
    before = sum(item.replicas for item in found)
    after = sum(item.target for item in decisions)
    if policy.max_replicas is not None:
        assert after <= max(policy.max_replicas, before)
    for item, decision in zip(found, decisions, strict=True):
        assert decision.sentence or decision.action is ScalingAction.HOLD
        if item.maximum is not None:
            assert decision.target <= max(item.maximum, item.running)


@settings(max_examples=100, deadline=None)
@given(
    groups,
    st.lists(members, min_size=1, max_size=5, unique_by=lambda item: item.name),
    st.integers(1, 100),
)
def test_a_group_with_room_grows_for_claims_on_any_member(policy, found, queue) -> None:
    """Demand for single members that are full never blocks the others."""
    own = sum(item.queue for item in found)
    group = ScaledGroup(policy=policy, members=tuple(found), now=NOW, queue=queue + own)
    limit, size = policy.max_replicas, sum(item.size for item in found)
    assume(limit is None or size < limit)
    rooms = [1 if item.maximum is None else item.maximum - item.size for item in found]
    assume(min(rooms) >= 0 and any(rooms))  # Where a maximum was lowered, others remove some.
    assume(queue > sum(max(item.coming - item.queue, 0) for item in found))
    assert sum(item.target for item in decide(group)) > sum(item.replicas for item in found)
