"""When a sandbox has been idle long enough to be paused. Pure.

Idle is: no request on its way or answered, and no CPU use above its threshold, for as long as it
asked. What is not known counts as busy: nothing is paused for want of a measurement.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from paddock.cache import states
from paddock.cache.states import SandboxState
from paddock.resources.kinds.sandbox import CONDITION_READY, Sandbox
from paddock.resources.meta import condition

_BETWEEN_LOOKS = timedelta(seconds=15)
"""Processors are looked at more often than that."""


class Load(Struct, frozen=True):
    """How busy a sandbox's processors were at one moment."""

    at: datetime
    percent: float


class Seen(Struct, frozen=True, kw_only=True):
    """What is known of a sandbox's doings."""

    watching_since: datetime
    """Nothing is known from before."""
    last_request: datetime | None = None
    loads: Sequence[Load] = ()
    """Oldest first."""


class Pause(Struct, frozen=True):
    """Pause it now."""

    idle_seconds: int


def plan(sandbox: Sandbox, seen: Seen, *, now: datetime) -> Pause | None:
    """Say whether to pause a sandbox for being idle."""
    wanted = sandbox.spec.idle_pause
    if wanted is None or sandbox.spec.paused:
        return None
    if states.state(sandbox, now) is not SandboxState.RUNNING or not states.is_ready(sandbox):
        return None
    quiet_since = max(_beginnings(sandbox, seen))
    busy = [load.at for load in seen.loads if load.percent >= wanted.cpu_percent_below]
    if busy:
        quiet_since = max(quiet_since, busy[-1])
    limit = timedelta(seconds=wanted.after_seconds)
    if now - quiet_since < limit or not _is_measured(seen, quiet_since, limit, now):
        return None
    return Pause(int((now - quiet_since).total_seconds()))


def _beginnings(sandbox: Sandbox, seen: Seen) -> list[datetime]:
    found = [seen.watching_since]
    if sandbox.spec.claim is not None:
        found.append(sandbox.spec.claim.claim_time)
    # Since it last came to life: a pause before that was no idleness.
    ready = condition(sandbox.status.conditions, CONDITION_READY)
    if ready is not None and ready.last_transition_time is not None:
        found.append(ready.last_transition_time)
    if sandbox.status.started_at is not None:
        found.append(sandbox.status.started_at)
    if seen.last_request is not None:
        found.append(seen.last_request)
    return found


def _is_measured(seen: Seen, since: datetime, limit: timedelta, now: datetime) -> bool:
    """Say whether the processors were looked at late enough in the quiet time, and not long ago.

    A look tells of the time since the one before: soon after a request it says little of what the
    request began. Half of a time shorter than that between two looks might never have one in it.
    """
    recent = now - max(limit / 2, _BETWEEN_LOOKS)
    telling = since + min(limit, _BETWEEN_LOOKS)
    return any(load.at >= max(recent, telling) for load in seen.loads)
