"""Which events of the audit log are shown, and how. Pure."""

import re
from datetime import datetime, timedelta

from msgspec import Struct

from paddock.api.audit.event import AuditedObject, AuditEvent, micro_time
from paddock.kit.errors import InvalidError

_AGE = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SHOWN = ("paddock.dev/created", "paddock.dev/repeated", "paddock.dev/lost-lines")
_MAX_NOTE = 120


class AuditFilter(Struct, frozen=True, kw_only=True):
    """Which lines are shown."""

    team: str | None = None
    key: str | None = None
    since: str = ""
    refused: bool = False

    def matches(self, event: AuditEvent) -> bool:
        """Whether an event is shown."""
        return (
            (self.team is None or event.user.groups[:1] == (self.team,))
            and (self.key is None or event.user.uid == self.key)
            and event.stage_timestamp >= self.since
            and (not self.refused or event.is_refused)
        )


def parse_since(text: str, now: datetime) -> str:
    """Return a time as events write it, from an age such as `10m` or a time."""
    if match := _AGE.fullmatch(text):
        return micro_time(now - timedelta(**{_UNITS[match[2]]: int(match[1])}))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidError(
            f"--since: {text!r} is neither an age nor a time",
            hint="use 30s, 10m, 2h, 7d, or 2030-01-31T12:00:00Z",
        ) from error
    return micro_time(moment.astimezone(now.tzinfo))


def row(event: AuditEvent) -> str:
    """Return an event as a line for people."""
    target = event.object_ref
    what = event.request_uri
    if isinstance(target, AuditedObject):
        parts = (target.resource, target.subresource)
        names = (target.namespace, target.name)
        what = "/".join(part for part in parts if part)
        what += f" {'/'.join(part for part in names if part)}" if any(names) else ""
    status = event.response_status
    notes = [
        f"{name.partition('/')[2]}={event.annotations[name][:_MAX_NOTE]}"
        for name in _SHOWN
        if name in event.annotations
    ]
    who = f"key={event.user.uid}" if event.user.uid else event.user.username
    team = f"team={event.user.groups[0]}" if event.user.uid else ""
    cells = (
        f"{event.stage_timestamp[:19]}Z",
        str(status.code),
        event.verb,
        what,
        team,
        who,
        f"from={event.source_ips[0]}" if event.source_ips else "",
        status.reason,
        *notes,
        f"request={event.audit_id}",
    )
    return " ".join(cell for cell in cells if cell)
