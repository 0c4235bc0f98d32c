"""Decides whether a sandbox has been idle long enough to be paused. Pure.

Idle means: no request in flight or answered, and CPU use below the threshold, for `afterSeconds`.
Unknown counts as busy: nothing is paused for lack of a measurement.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from paddock.cache import states
from paddock.cache.states import SandboxState
from paddock.resources.kinds.sandbox import CONDITION_READY, Sandbox
from paddock.resources.meta import condition

_SAMPLE_PERIOD = timedelta(seconds=15)
"""CPU use is sampled more often than this."""


class Load(Struct, frozen=True):
    """CPU use of a sandbox at one moment."""

    at: datetime
    percent: float


class SandboxActivity(Struct, frozen=True, kw_only=True):
    """Known activity of a sandbox."""

    watching_since: datetime
    """No activity is known from before this time."""
    last_request: datetime | None = None
    loads: Sequence[Load] = ()
    """Oldest first."""


class PauseIdle(Struct, frozen=True):
    """Pause the sandbox now."""

    idle_seconds: int


def plan(sandbox: Sandbox, seen: SandboxActivity, *, now: datetime) -> PauseIdle | None:
    """Return a step to pause an idle sandbox, or `None`."""
    wanted = sandbox.spec.idle_pause
    if wanted is None or sandbox.spec.paused:
        return None
    if states.state(sandbox, now) is not SandboxState.RUNNING or not states.is_ready(sandbox):
        return None
    quiet_since = max(_activity_times(sandbox, seen))
    busy = [load.at for load in seen.loads if load.percent >= wanted.cpu_percent_below]
    if busy:
        quiet_since = max(quiet_since, busy[-1])
    limit = timedelta(seconds=wanted.after_seconds)
    if now - quiet_since < limit or not _is_measured(seen, quiet_since, limit, now):
        return None
    return PauseIdle(int((now - quiet_since).total_seconds()))


def _activity_times(sandbox: Sandbox, seen: SandboxActivity) -> list[datetime]:
    found = [seen.watching_since]
    if sandbox.spec.claim is not None:
        found.append(sandbox.spec.claim.claim_time)
    # Time before the last resume does not count as idle.
    ready = condition(sandbox.status.conditions, CONDITION_READY)
    if ready is not None and ready.last_transition_time is not None:
        found.append(ready.last_transition_time)
    if sandbox.status.started_at is not None:
        found.append(sandbox.status.started_at)
    if seen.last_request is not None:
        found.append(seen.last_request)
    return found


def _is_measured(seen: SandboxActivity, since: datetime, limit: timedelta, now: datetime) -> bool:
    """Whether CPU use was sampled late enough in the quiet time, and recently.

    A sample covers the time since the previous one: soon after a request it says little about what
    the request started. Half of a limit below the sampling period might never contain a sample.
    """
    recent = now - max(limit / 2, _SAMPLE_PERIOD)
    telling = since + min(limit, _SAMPLE_PERIOD)
    return any(load.at >= max(recent, telling) for load in seen.loads)
