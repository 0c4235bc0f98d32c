"""When hibernation is attempted again after it failed. Pure.

The failures are part of the status, so they outlive the controllers. A failed attempt costs a dump
of all memory. Therefore attempts are rare: few in one pause, and none soon after a failure.
"""

from datetime import datetime, timedelta

from paddock.kit.errors import PaddockError, UnstorableError
from paddock.resources.kinds.sandbox import HibernationFailures, SandboxStatus

ATTEMPTS = 4
"""The most attempts in a row while a sandbox stays paused."""
FIRST_SECONDS = 10
FACTOR = 3
MAX_SECONDS = 3600


def after_failure(
    status: SandboxStatus, error: PaddockError, *, now: datetime
) -> HibernationFailures:
    """Return the failures with one more.

    What cannot be stored stays so while the sandbox is frozen: there is no other attempt until it
    is resumed. Other errors may pass.
    """
    before = status.hibernation_failures
    count = before.count + 1 if before is not None else 1
    # The exponent is bounded: years of failures must not overflow.
    seconds = min(FIRST_SECONDS * FACTOR ** min(count - 1, 10), MAX_SECONDS)
    return HibernationFailures(
        count=count,
        retry_time=now + timedelta(seconds=seconds),
        is_final=isinstance(error, UnstorableError) or count >= ATTEMPTS,
        message=error.message,
    )


def is_due(status: SandboxStatus, *, now: datetime) -> bool:
    """Whether hibernation may be attempted now."""
    failures = status.hibernation_failures
    return failures is None or (not failures.is_final and failures.retry_time <= now)


def next_attempt(status: SandboxStatus) -> datetime | None:
    """Return when hibernation is attempted again; `None` if not before the next resume."""
    failures = status.hibernation_failures
    return None if failures is None or failures.is_final else failures.retry_time


def describe(failures: HibernationFailures) -> str:
    """Return what happened and what follows, for people."""
    if failures.is_final:
        then = "there is no other attempt until it is resumed"
    else:
        then = f"the next attempt is at {failures.retry_time:%H:%M:%S} UTC"
    return f"hibernation failed ({failures.count}), {then}: {failures.message}"
