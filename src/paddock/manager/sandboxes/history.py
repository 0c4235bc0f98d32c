"""The history of a sandbox as log lines, derived from the object; nothing is stored."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from paddock.cache.states import is_running_or_pausing
from paddock.manager.sandboxes.requests import LogEntry
from paddock.resources.kinds.sandbox import CONDITION_READY, Sandbox
from paddock.resources.meta import ConditionStatus


def recorded_events(sandbox: Sandbox, *, since: datetime | None) -> tuple[LogEntry, ...]:
    """Return the events that the object records, oldest first."""
    known = (
        LogEntry(at=at, level=level, message=message)
        for at, level, message in _moments(sandbox)
        if at is not None and (since is None or at >= since)
    )
    return tuple(sorted(known, key=lambda entry: entry.at))


def _moments(sandbox: Sandbox) -> Iterator[tuple[datetime | None, str, str]]:
    claim, status = sandbox.spec.claim, sandbox.status
    image = f" from {status.image}" if status.image else ""
    yield status.started_at, "info", f"started{image}"
    if claim is not None:
        yield claim.claim_time, "info", f"handed out as {claim.sandbox_id} to {claim.owner}"
    if not is_running_or_pausing(sandbox):
        yield status.paused_at, "info", f"paused: {status.pause_strategy}"
    for item in status.conditions:
        if item.message:
            bad = item.type == CONDITION_READY and item.status is ConditionStatus.FALSE
            level = "error" if bad else "warn"
            yield item.last_transition_time, level, f"{item.reason}: {item.message}"


def merged(
    first: Sequence[LogEntry], second: Sequence[LogEntry], *, limit: int
) -> tuple[LogEntry, ...]:
    """Return the last `limit` lines of both, oldest first."""
    return tuple(sorted((*first, *second), key=lambda entry: entry.at)[-limit:])
