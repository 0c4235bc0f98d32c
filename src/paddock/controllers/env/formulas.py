"""The formulas of scaling: warm buffer, ceiling, step size. Pure.

All are based on demand (sandboxes in use and waiting claims), never on the current size: a rule
based on size compounds while its own sandboxes are still starting.
"""

import math
from datetime import UTC, datetime, timedelta

from croniter import croniter

from paddock.resources.kinds.env import ScalePolicy, ScheduledFloor


def warm_buffer(policy: ScalePolicy, demand: int) -> int:
    """Return the number of idle sandboxes for a demand."""
    match policy:
        case ScalePolicy.CONSERVATIVE:
            return 1
        case ScalePolicy.DEFAULT:
            return max(_ceil(demand, 4), 1)
        case ScalePolicy.AGGRESSIVE:
            return max(_ceil(demand, 2), 1)


def ceiling(policy: ScalePolicy, demand: int) -> int:
    """Return the maximum size for a demand."""
    match policy:
        case ScalePolicy.CONSERVATIVE:
            return demand + 1
        case ScalePolicy.DEFAULT:
            return _ceil(3 * demand, 2) + 1
        case ScalePolicy.AGGRESSIVE:
            return 2 * demand + 2


def shrink_step(policy: ScalePolicy, size: int) -> int:
    """Return how many sandboxes may be removed in one step."""
    match policy:
        case ScalePolicy.CONSERVATIVE:
            return 1
        case ScalePolicy.DEFAULT:
            return max(_ceil(size, 4), 1)
        case ScalePolicy.AGGRESSIVE:
            return max(_ceil(size, 2), 1)


def scheduled_floor(schedules: tuple[ScheduledFloor, ...], now: datetime) -> int:
    """Return the highest minimum of the schedules that are active now."""
    return max((item.min_replicas for item in schedules if is_open(item, now)), default=0)


def is_open(schedule: ScheduledFloor, now: datetime) -> bool:
    """Whether a schedule is active: it started less than its duration ago."""
    # One microsecond later: croniter's "previous" excludes the instant itself.
    moment = now.astimezone(UTC) + timedelta(microseconds=1)
    opened: datetime = croniter(schedule.cron, moment).get_prev(datetime)
    return now - opened < timedelta(seconds=schedule.duration_seconds)


def decayed_rate(
    rate: float, since: datetime | None, claims: int, now: datetime, *, window_seconds: float
) -> float:
    """Return the claim rate: the old one decayed over the window, plus new claims."""
    elapsed = window_seconds if since is None else max((now - since).total_seconds(), 0.0)
    faded = rate * math.exp(-elapsed / window_seconds) + claims / window_seconds
    # A single old claim is no forecast.
    return faded if faded * window_seconds >= 0.05 else 0.0


def forecast(rate: float, *, lead_seconds: float) -> int:
    """Return the claims expected before sandboxes created now are ready."""
    return math.ceil(round(rate * lead_seconds, 9))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
