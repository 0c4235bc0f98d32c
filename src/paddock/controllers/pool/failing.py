"""Failed starts in a row: what counts as one, and how long a pool waits after it. Pure.

Those that were tried together fail together and count once. One that ran for a while has started
well: when a machine goes down with everything on it, its pools are filled again at once.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.census import revision_of
from paddock.kit.backoff import Backoff
from paddock.resources.pool import SandboxPoolStatus
from paddock.resources.sandbox import Sandbox

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
    since = _last_failure(status)
    if any(_counts(item, revision, since, now) for item in failed):
        failures = status.failures + 1
        until = now + timedelta(seconds=BACKOFF.delay(failures))
        return structs.replace(status, failures=failures, backoff_until=until)
    if status.failures and (since is None or any(_is_up_since(item, since) for item in ready)):
        return structs.replace(status, failures=0, backoff_until=None)
    return status


def _last_failure(status: SandboxPoolStatus) -> datetime | None:
    if status.backoff_until is None:
        return None
    return status.backoff_until - timedelta(seconds=BACKOFF.delay(status.failures))


def _counts(sandbox: Sandbox, revision: str, since: datetime | None, now: datetime) -> bool:
    started, created = sandbox.status.started_at, sandbox.metadata.creation_timestamp
    if revision_of(sandbox) != revision or (started is not None and now - started >= STEADY):
        return False
    return since is None or created is None or created >= since


def _is_up_since(sandbox: Sandbox, since: datetime) -> bool:
    started = sandbox.status.started_at
    return started is not None and started > since
