"""Records the calls of one ASGI application in the audit log.

The line is written when the response begins, before the client gets it. A call without a response
(an error, a client that left, the end of the process) is recorded when it ends.
"""

import asyncio
import ipaddress
from datetime import datetime
from functools import lru_cache

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paddock.api.audit import event as events
from paddock.api.audit.described import READS, Describe, DescribedCall
from paddock.api.audit.event import AuditEvent, AuditStatus
from paddock.api.audit.log import CREDENTIAL, AuditLog
from paddock.api.audit.notes import CALLER, AuditNotes, notes_of
from paddock.claims.caller import Caller
from paddock.kit import ids

REFUSED = frozenset((401, 403, 429))
"""Reads with these results are recorded too."""
CLIENT_LEFT = 499
_UNWRITABLE = msgspec.json.encode(
    {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "the audit log cannot be written, and audit_required is set",
        "reason": "ServiceUnavailable",
        "code": 503,
    }
)
"""Both APIs' clients find their fields in this."""
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    429: "TooManyRequests",
    CLIENT_LEFT: "ClientClosedRequest",
    500: "InternalError",
    503: "ServiceUnavailable",
}


class Audited:
    """An application whose calls are recorded."""

    def __init__(
        self, app: ASGIApp, audit: AuditLog, describe: Describe, *, unnamed: str = events.PEER
    ) -> None:
        """`unnamed` is the name of authenticated callers that have no key."""
        self._app = app
        self._audit = audit
        self._describe = describe
        self._unnamed = unnamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not self._audit.is_enabled:
            await self._app(scope, receive, send)
            return
        if scope["method"] not in READS and not self._audit.may_change():
            await _refuse(send)
            return
        received = self._audit.clock.now()
        is_recorded = False

        def record(code: int) -> None:
            nonlocal is_recorded
            if not is_recorded:
                is_recorded = True
                self._record(scope, code, received)

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except asyncio.CancelledError:
            record(CLIENT_LEFT)
            raise
        except BaseException:
            record(500)
            raise
        record(CLIENT_LEFT)

    def _record(self, scope: Scope, code: int, received: datetime) -> None:
        if scope["method"] in READS and code not in REFUSED:
            return
        call = self._describe(scope)
        if not call.is_change and code not in REFUSED:
            return
        self._audit.record(self._event(scope, code, received, call))

    def _event(
        self, scope: Scope, code: int, received: datetime, call: DescribedCall
    ) -> AuditEvent:
        notes = notes_of(scope)
        caller: Caller | None = scope.get(CALLER)
        headers = dict(scope["headers"])
        annotations = _created(notes)
        if caller is None:
            if code in REFUSED:
                credential = headers.get(b"x-api-key") or headers.get(b"authorization")
                annotations[CREDENTIAL] = "wrong" if credential else "missing"
        else:
            annotations |= _decision(code, notes, caller)
        if b"dryRun=All" in scope.get("query_string", b""):
            annotations["paddock.dev/dry-run"] = "true"
        request_id = scope.get("state", {}).get("request_id") or ids.request_id()
        return AuditEvent(
            audit_id=events.visible(request_id, 128),
            request_uri=events.request_uri(scope["path"]),
            verb=call.verb,
            user=events.user_of(caller, self._unnamed),
            source_ips=_source_ips(scope, headers.get(b"x-real-ip")),
            user_agent=events.visible(
                headers.get(b"user-agent", b"").decode("utf-8", "replace"), events.MAX_AGENT
            ),
            object_ref=call.target,
            response_status=_status(code, notes),
            request_received_timestamp=events.micro_time(received),
            stage_timestamp=events.micro_time(self._audit.clock.now()),
            annotations=annotations,
        )


def _status(code: int, notes: AuditNotes) -> AuditStatus:
    if code < 400:
        return AuditStatus(code)
    return AuditStatus(code, "Failure", notes.reason or _REASONS.get(code, ""))


def _created(notes: AuditNotes) -> dict[str, str]:
    found: dict[str, str] = {}
    if notes.created:
        found["paddock.dev/created"] = ",".join(notes.created[: events.MAX_CREATED])
    if notes.requested:
        found["paddock.dev/requested"] = str(notes.requested)
        found["paddock.dev/created-count"] = str(len(notes.created))
    return found


def _decision(code: int, notes: AuditNotes, caller: Caller) -> dict[str, str]:
    is_forbidden = code == 403
    reason = notes.forbidden if is_forbidden else f"role {caller.role}"
    return {
        "authorization.k8s.io/decision": "forbid" if is_forbidden else "allow",
        "authorization.k8s.io/reason": events.visible(reason, events.MAX_REASON),
    }


def _source_ips(scope: Scope, reported: bytes | None) -> tuple[str, ...]:
    """Return the client's address; if a gateway reported it, the gateway's follows."""
    peer = _address(scope["client"][0]) if scope.get("client") else ""
    client = _address(reported.decode("latin-1")) if reported else ""
    if not client or not peer or client == peer:
        return (client or peer,) if client or peer else ()
    return (client, peer)


@lru_cache(4096)
def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _UNWRITABLE})
