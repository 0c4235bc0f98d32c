"""When a sandbox counts as idle long enough: the pure decision."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from paddock.controllers.idle.plan import Load, PauseIdle, SandboxActivity, plan
from paddock.resources.kinds.sandbox import LABEL_POOL, IdlePause, Phase, Sandbox
from paddock.resources.meta import with_meta
from tests.cache.make import identity, in_phase, sandbox, with_spec

START = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def box(**changes) -> Sandbox:
    made = in_phase(sandbox(), Phase.RUNNING, ready=True)
    claim = structs.replace(identity(), claim_time=START)
    made = with_spec(made, idle_pause=IdlePause(after_seconds=60), claim=claim, **changes)
    conditions = tuple(
        structs.replace(item, last_transition_time=START) for item in made.status.conditions
    )
    status = structs.replace(made.status, conditions=conditions, started_at=START)
    return structs.replace(made, status=status)


def seen(last_request=None, loads=((100, 0.0),), since=0.0) -> SandboxActivity:
    return SandboxActivity(
        watching_since=at(since),
        last_request=None if last_request is None else at(last_request),
        loads=[Load(at(when), percent) for when, percent in loads],
    )


@pytest.mark.parametrize(
    ("what", "known", "now", "expected"),
    [
        ("nothing since the start", seen(), 100, PauseIdle(100)),
        ("too soon", seen(loads=[(50, 0.0)]), 59, None),
        ("a request half a minute ago", seen(last_request=70), 100, None),
        ("a request long ago", seen(last_request=30), 100, PauseIdle(70)),
        ("busy a while ago", seen(loads=[(60, 90.0), (90, 1.0)]), 100, None),
        ("busy long ago", seen(loads=[(20, 90.0), (90, 1.0)]), 100, PauseIdle(80)),
        ("just at the threshold is busy", seen(loads=[(90, 5.0)]), 100, None),
        ("never measured", seen(loads=[]), 1000, None),
        ("measured long ago only", seen(loads=[(10, 0.0)]), 1000, None),
        ("watched only since a moment", seen(since=80), 100, None),
    ],
)
def test_a_sandbox_idle_long_enough_is_paused(what, known, now, expected) -> None:
    assert plan(box(), known, now=at(now)) == expected, what


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (seen(loads=[(94, 0.0)]), PauseIdle(100)),
        (seen(loads=[(94, 90.0)]), None),
        (seen(last_request=96, loads=[(94, 0.0)]), None),
        (seen(last_request=94, loads=[(93, 0.0)]), None),
        (seen(last_request=90, loads=[(91, 1.0)]), None),
        (seen(last_request=90, loads=[(95, 1.0)]), PauseIdle(10)),
        (seen(loads=[(80, 0.0)]), None),
    ],
)
def test_a_limit_shorter_than_the_sampling_period_works(known, expected) -> None:
    assert plan(with_spec(box(), idle_pause=IdlePause(after_seconds=5)), known, now=at(100)) == (
        expected
    )


def test_only_running_sandboxes_with_idle_pause_are_paused() -> None:
    now = at(100)
    assert plan(with_spec(box(), idle_pause=None), seen(), now=now) is None
    assert plan(with_spec(box(), paused=True), seen(), now=now) is None
    assert plan(pooled(with_spec(box(), claim=None)), seen(), now=now) is None
    assert plan(in_phase(box(), Phase.PAUSED), seen(), now=now) is None


def test_a_declared_unclaimed_sandbox_is_paused_too() -> None:
    assert plan(with_spec(box(), claim=None), seen(), now=at(100)) == PauseIdle(100)


def pooled(made: Sandbox) -> Sandbox:
    return with_meta(made, labels={LABEL_POOL: "base"})


def test_time_spent_paused_does_not_count_as_idle() -> None:
    made = box()
    conditions = tuple(
        structs.replace(item, last_transition_time=at(95)) for item in made.status.conditions
    )
    woken = structs.replace(made, status=structs.replace(made.status, conditions=conditions))
    assert plan(woken, seen(), now=at(100)) is None
