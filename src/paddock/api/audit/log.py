"""The audit log of one process: writes events, collapses floods, reports lines that were lost.

A line that cannot be written does not fail the call, because the change has already happened. It
is counted and reported, and the next line that can be written states how many were lost. With
`is_required`, calls that change something are refused until the log can be written again.
"""

import asyncio
import logging

import msgspec

from paddock.api.audit import event as events
from paddock.api.audit.collapse import RefusalCounter, RefusalKey, Repeated
from paddock.api.audit.event import AuditEvent, AuditStatus, AuditUser
from paddock.api.audit.files import AuditSink
from paddock.kit import ids, metrics
from paddock.kit.addresses import client_network
from paddock.kit.clock import Clock
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
REPORT_SECONDS = 60.0
CREDENTIAL = "paddock.dev/credential"
"""Annotation: `wrong` or `missing`."""
REPEATED = "paddock.dev/repeated"
"""Annotation: how many more such calls were refused in the minute after the first."""
LOST = "paddock.dev/lost-lines"
"""Annotation: how many lines before this one could not be written."""
_FAILURES = metrics.counter(
    "paddock_audit_failures_total", "Lines of the audit log that could not be written."
)


class AuditLog:
    """Writes events to a sink; without one, there is no audit log."""

    def __init__(self, sink: AuditSink | None, clock: Clock, *, is_required: bool = False) -> None:
        self._sink = sink
        self.clock = clock
        self.is_enabled = sink is not None
        self._is_required = is_required and sink is not None
        self._refusals = RefusalCounter()
        self._lost = 0
        self._reported_at = -REPORT_SECONDS

    def record(self, event: AuditEvent) -> None:
        """Write an event; repeated refusals are counted instead."""
        now = self.clock.monotonic()
        self._write_ended(self._refusals.take_ended(now))
        key = collapse_key(event)
        if key is None or self._refusals.is_first(key, event, now):
            self._write(event)

    def may_change(self) -> bool:
        """Whether calls that change something are served."""
        if not self._is_required or not self._lost:
            return True
        if self._put(events.encode(_lines_lost(self._lost, self.clock))):
            self._lost = 0
        return not self._lost

    async def run(self) -> None:
        """Write counts of refusals when their minute is over, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._sink is not None:
                self._sink.check()
            self._write_ended(self._refusals.take_ended(self.clock.monotonic()))

    def close(self) -> None:
        """Write what was counted, and close the sink."""
        self._write_ended(self._refusals.take_all())
        if self._sink is not None:
            self._sink.close()

    def _write_ended(self, ended: list[Repeated]) -> None:
        for item in ended:
            self._write(_summary(item, self.clock))

    def _write(self, event: AuditEvent) -> None:
        lines = events.encode(event)
        if self._lost:
            lines = events.encode(_lines_lost(self._lost, self.clock)) + lines
        if self._put(lines):
            self._lost = 0
        else:
            self._lost += 1
            _FAILURES.inc()

    def _put(self, lines: bytes) -> bool:
        """Write lines; return whether that was possible."""
        if self._sink is None:
            return True
        try:
            self._sink.write(lines)
        except OSError as error:
            now = self.clock.monotonic()
            if now >= self._reported_at + REPORT_SECONDS:
                self._reported_at = now
                log.error("audit log not written", extra=fields(error=str(error)))  # noqa: TRY400
            return False
        return True


def collapse_key(event: AuditEvent) -> RefusalKey | None:
    """Return what repeated refusals have in common; None if each is written.

    Of unauthenticated callers the path is ignored: they can choose any. Of keys, only calls beyond
    a rate or a quota are collapsed.
    """
    code = event.response_status.code
    if code < 400:
        return None
    if event.user.username == events.ANONYMOUS:
        sender = client_network(event.source_ips[0]) if event.source_ips else ""
        return RefusalKey(sender or "unknown", code, event.annotations.get(CREDENTIAL, ""))
    if code == 429:
        what = f"{event.verb} {event.object_ref.resource if event.object_ref else ''}"
        return RefusalKey(event.user.uid or event.user.username, code, what)
    return None


def _summary(item: Repeated, clock: Clock) -> AuditEvent:
    return msgspec.structs.replace(
        item.first,
        stage_timestamp=events.micro_time(clock.now()),
        source_ips=() if item.is_shared else item.first.source_ips,
        annotations={**item.first.annotations, REPEATED: str(item.more)},
    )


def _lines_lost(count: int, clock: Clock) -> AuditEvent:
    now = events.micro_time(clock.now())
    return AuditEvent(
        audit_id=ids.request_id(),
        request_uri="",
        verb="audit",
        user=AuditUser("paddock:system"),
        response_status=AuditStatus(500, "Failure", "LinesLost"),
        request_received_timestamp=now,
        stage_timestamp=now,
        annotations={LOST: str(count)},
    )
