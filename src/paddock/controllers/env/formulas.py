"""The arithmetic of scaling: how much warmth, how high at most, how big a step. Pure.

Everything is anchored in demand (sandboxes in use and claims that wait), never in how many there
are already: a rule of the latter kind compounds while its own sandboxes are still starting.
"""

import math
from datetime import UTC, datetime, timedelta

from croniter import croniter

from paddock.resources.kinds.env import ScalePolicy, ScheduledFloor


def warm_buffer(policy: ScalePolicy, demand: int) -> int:
    """Say how many idle ones a demand deserves."""
    match policy:
        case ScalePolicy.CONSERVATIVE:
            return 1
        case ScalePolicy.DEFAULT:
            return max(_ceil(demand, 4), 1)
        case ScalePolicy.AGGRESSIVE:
            return max(_ceil(demand, 2), 1)


def ceiling(policy: ScalePolicy, demand: int) -> int:
    """Say how large a pool may grow, at most, for a demand."""
    match policy:
        case ScalePolicy.CONSERVATIVE:
            return demand + 1
        case ScalePolicy.DEFAULT:
            return _ceil(3 * demand, 2) + 1
        case ScalePolicy.AGGRESSIVE:
            return 2 * demand + 2


def shrink_step(policy: ScalePolicy, size: int) -> int:
    """Say how many may go at once."""
    match policy:
        case ScalePolicy.CONSERVATIVE:
            return 1
        case ScalePolicy.DEFAULT:
            return max(_ceil(size, 4), 1)
        case ScalePolicy.AGGRESSIVE:
            return max(_ceil(size, 2), 1)


def scheduled_floor(schedules: tuple[ScheduledFloor, ...], now: datetime) -> int:
    """Give the highest minimum of the windows that are open now."""
    return max((item.min_replicas for item in schedules if is_open(item, now)), default=0)


def is_open(schedule: ScheduledFloor, now: datetime) -> bool:
    """Say whether a window is open: it opened last less than its duration ago."""
    # One tick later, since croniter takes "previous" to exclude the very instant.
    moment = now.astimezone(UTC) + timedelta(microseconds=1)
    opened: datetime = croniter(schedule.cron, moment).get_prev(datetime)
    return now - opened < timedelta(seconds=schedule.duration_seconds)


def decayed_rate(
    rate: float, since: datetime | None, claims: int, now: datetime, *, window_seconds: float
) -> float:
    """Give the rate of claims: what was, fading over the window, and what came since."""
    elapsed = window_seconds if since is None else max((now - since).total_seconds(), 0.0)
    faded = rate * math.exp(-elapsed / window_seconds) + claims / window_seconds
    # A claim a day ago is no forecast.
    return faded if faded * window_seconds >= 0.05 else 0.0


def forecast(rate: float, *, lead_seconds: float) -> int:
    """Say how many claims are to be expected until sandboxes ordered now are ready."""
    return math.ceil(round(rate * lead_seconds, 9))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
