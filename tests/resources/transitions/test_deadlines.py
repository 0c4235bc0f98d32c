"""Effects of operations on the deadlines of a sandbox."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from paddock.resources.kinds.sandbox import ClaimIdentity, SandboxSpec, WakeOnTraffic
from paddock.resources.transitions import deadlines

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def spec(*, timeout: int | None = 60, auto_pause: bool = False, **more: Any) -> SandboxSpec:
    claim = ClaimIdentity(
        sandbox_id="i",
        owner="team",
        lock="l",
        claim_time=NOW,
        timeout_seconds=timeout,
        auto_pause=auto_pause,
    )
    return SandboxSpec(claim=claim, **more)


def instants(found: SandboxSpec) -> tuple[bool, datetime | None, datetime | None]:
    return found.paused, found.pause_time, found.shutdown_time


@pytest.mark.parametrize(
    ("before", "seconds", "expected"),
    [
        pytest.param(spec(), 10, (False, None, at(10)), id="killed at the timeout"),
        pytest.param(spec(auto_pause=True), 10, (False, at(10), None), id="paused at the timeout"),
        pytest.param(
            spec(shutdown_time=at(99)), 10, (False, None, at(10)), id="earlier than before"
        ),
        pytest.param(
            spec(auto_pause=True, shutdown_time=at(99)),
            10,
            (False, at(10), None),
            id="pause time replaces shutdown time",
        ),
        pytest.param(spec(timeout=None), 10, (False, None, None), id="without a timeout"),
        pytest.param(SandboxSpec(), 10, (False, None, at(10)), id="unclaimed"),
    ],
)
def test_setting_a_timeout(before: SandboxSpec, seconds: float, expected: Any):
    assert instants(deadlines.with_timeout(before, now=NOW, seconds=seconds)) == expected


@pytest.mark.parametrize(
    ("before", "seconds", "expected"),
    [
        pytest.param(spec(shutdown_time=at(5)), 10, (False, None, at(10)), id="later"),
        pytest.param(spec(shutdown_time=at(10)), 10, (False, None, at(10)), id="unchanged"),
        pytest.param(spec(shutdown_time=at(50)), 10, (False, None, at(50)), id="never earlier"),
        pytest.param(
            spec(auto_pause=True, pause_time=at(5)), 10, (False, at(10), None), id="pause time"
        ),
        pytest.param(spec(), 10, (False, None, None), id="no deadline stays none"),
        pytest.param(spec(timeout=None), 10, (False, None, None), id="without a timeout"),
    ],
)
def test_a_timeout_extends_a_deadline_and_never_shortens_it(
    before: SandboxSpec, seconds: float, expected: Any
):
    assert instants(deadlines.extended(before, now=NOW, seconds=seconds)) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param(spec(shutdown_time=at(5)), (True, None, None), id="kept indefinitely"),
        pytest.param(
            spec(pause_time=at(5), paused_retention_seconds=30), (True, None, at(30)), id="retained"
        ),
        pytest.param(spec(paused_retention_seconds=0), (True, None, NOW), id="no retention"),
    ],
)
def test_a_pause_starts_the_retention(before: SandboxSpec, expected: Any):
    found = deadlines.paused(before, now=NOW)
    assert instants(found) == expected
    assert found.retained_until == found.shutdown_time
    assert deadlines.is_retained(found) == (found.shutdown_time is not None)
    for running in (
        deadlines.woken(found, now=NOW),
        deadlines.resumed(found, now=NOW, seconds=20),
    ):
        assert running.retained_until is None
        assert not deadlines.is_retained(running)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param(spec(paused=True, shutdown_time=at(5)), (False, None, at(20)), id="killed"),
        pytest.param(spec(paused=True, auto_pause=True), (False, at(20), None), id="paused again"),
        pytest.param(
            spec(paused=True, timeout=None, shutdown_time=at(5)),
            (False, None, None),
            id="no timeout",
        ),
    ],
)
def test_a_resume_sets_a_new_deadline(before: SandboxSpec, expected: Any):
    assert instants(deadlines.resumed(before, now=NOW, seconds=20)) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param(
            spec(paused=True, auto_pause=True), (False, at(300), None), id="paused again later"
        ),
        pytest.param(
            spec(paused=True, auto_pause=True, shutdown_time=at(9), retained_until=at(9)),
            (False, at(300), None),
            id="the retention ends with the pause",
        ),
        pytest.param(
            spec(paused=True, shutdown_time=at(7)),
            (False, None, at(7)),
            id="traffic does not extend the deadline",
        ),
        pytest.param(
            spec(paused=True),
            (False, None, at(300)),
            id="killed later, though its pause cleared it",
        ),
        pytest.param(
            spec(paused=True, shutdown_time=at(9000), retained_until=at(9000)),
            (False, None, at(300)),
            id="killed later, not at the end of the retention",
        ),
        pytest.param(
            spec(paused=True, timeout=None, shutdown_time=at(7)),
            (False, None, at(7)),
            id="a deadline set during the pause, without a timeout",
        ),
        pytest.param(
            spec(paused=True, timeout=None, shutdown_time=at(9), retained_until=at(9)),
            (False, None, None),
            id="no timeout",
        ),
        pytest.param(
            spec(paused=True, shutdown_time=at(7000), retained_until=at(9000)),
            (False, None, at(7000)),
            id="a deadline set during the pause, before the retention ends",
        ),
    ],
)
def test_resuming_by_traffic(before: SandboxSpec, expected: Any):
    assert instants(deadlines.woken(before, now=NOW)) == expected


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        (spec(timeout=10), deadlines.MIN_WAKE_SECONDS),
        (spec(timeout=None), deadlines.MIN_WAKE_SECONDS),
        (SandboxSpec(), deadlines.MIN_WAKE_SECONDS),
        (spec(timeout=1000), 1000),
        (spec(wake_on_traffic=WakeOnTraffic(enabled=True, timeout_seconds=900)), 900),
        (spec(timeout=1000, wake_on_traffic=WakeOnTraffic(timeout_seconds=900)), 1000),
    ],
)
def test_a_sandbox_resumed_by_traffic_runs_for_a_minimum_time(found: SandboxSpec, seconds: int):
    assert deadlines.wake_seconds(found) == seconds


@pytest.mark.parametrize(
    ("found", "is_over", "is_pause_due"),
    [
        pytest.param(spec(), False, False, id="no deadline"),
        pytest.param(spec(shutdown_time=at(1)), False, False, id="before shutdown"),
        pytest.param(spec(shutdown_time=NOW), True, False, id="at shutdown"),
        pytest.param(spec(pause_time=NOW), False, True, id="at pause"),
        pytest.param(spec(pause_time=at(1)), False, False, id="before pause"),
        pytest.param(spec(pause_time=NOW, shutdown_time=NOW), False, True, id="a due pause wins"),
        pytest.param(
            spec(paused=True, pause_time=NOW, shutdown_time=NOW), True, False, id="already paused"
        ),
    ],
)
def test_when_deadlines_are_due(found: SandboxSpec, is_over: bool, is_pause_due: bool):
    assert deadlines.is_over(found, now=NOW) is is_over
    assert deadlines.is_pause_due(found, now=NOW) is is_pause_due


@pytest.mark.parametrize(
    ("found", "end", "timer"),
    [
        (spec(), None, None),
        (spec(shutdown_time=at(5)), at(5), at(5)),
        (spec(pause_time=at(9), shutdown_time=at(5)), at(9), at(5)),
        (spec(pause_time=at(3), shutdown_time=at(5)), at(3), at(3)),
        (spec(paused=True, pause_time=at(3), shutdown_time=at(5)), at(3), at(5)),
        (spec(paused=True, pause_time=at(3)), at(3), None),
    ],
)
def test_the_end_and_the_next_timer(
    found: SandboxSpec, end: datetime | None, timer: datetime | None
):
    assert deadlines.end_of(found) == end
    assert deadlines.next_instant(found) == timer
