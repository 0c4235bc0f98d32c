"""Changes of a sandbox's deadlines: pure functions of its spec.

A claimed sandbox has two deadlines: `pauseTime` and `shutdownTime`. `claim.autoPause` decides which
of them its timeout sets. A sandbox without a timeout
(`claim.timeoutSeconds` is `None`) keeps neither, through every operation.
"""

import math
from datetime import datetime, timedelta

from msgspec import structs

from paddock.resources.kinds.sandbox import PauseDeadlines, SandboxSpec

MIN_WAKE_SECONDS = 300
"""A sandbox resumed by traffic runs at least this long before its timeout ends."""


def end_of(spec: SandboxSpec) -> datetime | None:
    """Return when its timeout ends, as shown to clients (`endAt`)."""
    return spec.pause_time or spec.shutdown_time


def never_ends(spec: SandboxSpec) -> bool:
    """Whether it was claimed without a timeout."""
    return spec.claim is not None and spec.claim.timeout_seconds is None


def with_timeout(spec: SandboxSpec, *, now: datetime, seconds: float) -> SandboxSpec:
    """Set the timeout to this many seconds from now. It may be earlier or later than before."""
    if never_ends(spec):
        return spec
    end = now + timedelta(seconds=seconds)
    if spec.claim is not None and spec.claim.auto_pause:
        return structs.replace(spec, pause_time=end, shutdown_time=None)
    return structs.replace(spec, pause_time=None, shutdown_time=end)


def extended(spec: SandboxSpec, *, now: datetime, seconds: float) -> SandboxSpec:
    """Extend the timeout to at least this many seconds from now. Never shorten it."""
    end = end_of(spec)
    if end is None or end >= now + timedelta(seconds=seconds):
        return spec
    return with_timeout(spec, now=now, seconds=seconds)


def paused(spec: SandboxSpec, *, now: datetime) -> SandboxSpec:
    """Pause it: the flag and the deadlines change together. It is then kept for its retention.

    The deadlines that it had are recorded, for the case that it cannot be paused.
    """
    if spec.paused_retention_seconds is None:
        until = None
    else:
        until = now + timedelta(seconds=spec.paused_retention_seconds)
    return structs.replace(
        spec,
        paused=True,
        pause_time=None,
        shutdown_time=until,
        retained_until=until,
        before_pause=PauseDeadlines(
            pause_time=spec.pause_time, shutdown_time=spec.shutdown_time, requested_at=now
        ),
        resumed_for_seconds=None,
    )


def with_failed_pause(spec: SandboxSpec, *, now: datetime) -> SandboxSpec:
    """Clear the flag of a pause that failed. The sandbox keeps the deadlines that it had.

    A sandbox with a timeout never runs without a deadline: if none is known, its pause is due now.
    """
    before = spec.before_pause
    running = structs.replace(spec, paused=False, retained_until=None, before_pause=None)
    if spec.pause_time is not None or spec.shutdown_time != spec.retained_until:
        return running  # declared, or set since the pause
    if before is not None:
        return structs.replace(
            running, pause_time=before.pause_time, shutdown_time=before.shutdown_time
        )
    is_limited = spec.claim is not None and spec.claim.timeout_seconds is not None
    return structs.replace(running, pause_time=now if is_limited else None, shutdown_time=None)


def resumed(spec: SandboxSpec, *, now: datetime, seconds: float) -> SandboxSpec:
    """Resume it with a fresh timeout, in the same write that clears the flag."""
    running = structs.replace(
        spec,
        paused=False,
        pause_time=None,
        shutdown_time=None,
        retained_until=None,
        before_pause=None,
        resumed_for_seconds=math.ceil(seconds),
    )
    return with_timeout(running, now=now, seconds=seconds)


def with_time_left(spec: SandboxSpec, *, now: datetime) -> SandboxSpec:
    """Return the deadlines after a resume that took longer than its timeout.

    The timeout counts from now. A deadline that the resume kept is not extended.
    """
    if spec.resumed_for_seconds is None or not is_over(spec, now=now):
        return spec
    return with_timeout(spec, now=now, seconds=spec.resumed_for_seconds)


def woken(spec: SandboxSpec, *, now: datetime) -> SandboxSpec:
    """Resume it by traffic, with a new timeout if the pause ended the last one.

    A shutdown that is still due is kept: incoming traffic does not extend it. The end of a
    retention belongs to the pause and is removed with it.
    """
    due = None if is_retained(spec) else spec.shutdown_time
    running = structs.replace(
        spec,
        paused=False,
        pause_time=None,
        shutdown_time=due,
        retained_until=None,
        before_pause=None,
        resumed_for_seconds=None,
    )
    if never_ends(spec) or spec.claim is None:
        return running
    seconds = wake_seconds(spec)
    until = now + timedelta(seconds=seconds)
    if spec.claim.auto_pause:
        return structs.replace(running, pause_time=until)
    if due is not None:
        return running
    return structs.replace(running, shutdown_time=until, resumed_for_seconds=seconds)


def wake_seconds(spec: SandboxSpec) -> int:
    """Return how long a sandbox resumed by traffic runs until its timeout ends."""
    configured = spec.wake_on_traffic.timeout_seconds if spec.wake_on_traffic else 0
    claimed = spec.claim.timeout_seconds if spec.claim and spec.claim.timeout_seconds else 0
    return max(configured, claimed, MIN_WAKE_SECONDS)


def is_retained(spec: SandboxSpec) -> bool:
    """Whether it is paused and ends with its retention, not at another time set since."""
    return (
        spec.paused
        and spec.retained_until is not None
        and spec.shutdown_time == spec.retained_until
    )


def is_over(spec: SandboxSpec, *, now: datetime) -> bool:
    """Whether its shutdown deadline has passed.

    A due pause takes precedence over a due shutdown: if both passed during a downtime, a sandbox
    with auto-pause is paused and loses no data.
    """
    if spec.shutdown_time is None or spec.shutdown_time > now:
        return False
    return not is_pause_due(spec, now=now)


def is_pause_due(spec: SandboxSpec, *, now: datetime) -> bool:
    """Whether its pause is due."""
    return not spec.paused and spec.pause_time is not None and spec.pause_time <= now


def next_instant(spec: SandboxSpec) -> datetime | None:
    """Return the earliest deadline, for a timer."""
    instants = [
        moment
        for moment in (None if spec.paused else spec.pause_time, spec.shutdown_time)
        if moment is not None
    ]
    return min(instants, default=None)
