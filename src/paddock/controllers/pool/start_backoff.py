"""Failed starts in a row: what counts as one, and how long a pool waits after it. Pure.

Those that were tried together fail together and count once; each bears the number of failures that
it was tried after, so that nobody's clock is held against another's. One that ran for a while has
started well: when a machine goes down with everything on it, its pools are filled again at once.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.pool_members import revision_of
from paddock.kit.backoff import Backoff
from paddock.resources.kinds.pool import SandboxPoolStatus
from paddock.resources.kinds.sandbox import ANNOTATION_AFTER_FAILURES, Sandbox

BACKOFF = Backoff(base_seconds=1.0, cap_seconds=300.0, jitter=0.0)
STEADY = timedelta(seconds=60)
"""Who ran so long has started well."""


def told(
    status: SandboxPoolStatus,
    failed: Iterable[Sandbox],
    ready: Iterable[Sandbox],
    *,
    revision: str,
    now: datetime,
) -> SandboxPoolStatus:
    """Count what failed, or begin anew where a start went well or the template is another."""
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
    told = sandbox.metadata.annotations.get(ANNOTATION_AFTER_FAILURES, "")
    return int(told) if told.isascii() and told.isdigit() and len(told) < 10 else 0


def _counts(sandbox: Sandbox, revision: str, failures: int, now: datetime) -> bool:
    started = sandbox.status.started_at
    if revision_of(sandbox) != revision or (started is not None and now - started >= STEADY):
        return False
    return _tried_after(sandbox) >= failures


def _is_up_after(sandbox: Sandbox, status: SandboxPoolStatus) -> bool:
    """Say whether it was tried after the last failure, or came up after it all the same."""
    if status.backoff_until is None or _tried_after(sandbox) >= status.failures:
        return True
    failed_at = status.backoff_until - timedelta(seconds=BACKOFF.delay(status.failures))
    started = sandbox.status.started_at
    return started is not None and started > failed_at
