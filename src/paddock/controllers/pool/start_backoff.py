"""Counts consecutive failed starts of a pool and computes the backoff. Pure.

Sandboxes that were created together fail together and count once: each carries the number of
failures before its creation, so no clocks are compared. A sandbox that ran for a while started
well: when a machine goes down, its pools are refilled at once.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.pool_members import revision_of
from paddock.kit.backoff import Backoff
from paddock.resources.kinds.pool import SandboxPoolStatus
from paddock.resources.kinds.sandbox import ANNOTATION_AFTER_FAILURES, Sandbox

BACKOFF = Backoff(base_seconds=1.0, cap_seconds=300.0, jitter=0.0)
STABLE = timedelta(seconds=60)
"""A sandbox that ran this long counts as a successful start."""


def count_starts(
    status: SandboxPoolStatus,
    failed: Iterable[Sandbox],
    ready: Iterable[Sandbox],
    *,
    revision: str,
    now: datetime,
) -> SandboxPoolStatus:
    """Return the status with failures counted, or reset by a good start or a new template."""
    if status.failures and status.revision != revision:
        status = structs.replace(status, failures=0, backoff_until=None)
    if any(_counts(item, revision, status.failures, now) for item in failed):
        failures = status.failures + 1
        until = now + timedelta(seconds=BACKOFF.delay(failures))
        return structs.replace(status, failures=failures, backoff_until=until)
    if status.failures and any(_is_up_after(item, status) for item in ready):
        return structs.replace(status, failures=0, backoff_until=None)
    return status


def _tried_after(sandbox: Sandbox) -> int:
    value = sandbox.metadata.annotations.get(ANNOTATION_AFTER_FAILURES, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0


def _counts(sandbox: Sandbox, revision: str, failures: int, now: datetime) -> bool:
    started = sandbox.status.started_at
    if revision_of(sandbox) != revision or (started is not None and now - started >= STABLE):
        return False
    return _tried_after(sandbox) >= failures


def _is_up_after(sandbox: Sandbox, status: SandboxPoolStatus) -> bool:
    """Whether it was created after the last failure, or became ready after it."""
    if status.backoff_until is None or _tried_after(sandbox) >= status.failures:
        return True
    failed_at = status.backoff_until - timedelta(seconds=BACKOFF.delay(status.failures))
    started = sandbox.status.started_at
    return started is not None and started > failed_at
