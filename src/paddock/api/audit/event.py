"""The line of the audit log: an Event of `audit.k8s.io/v1`, level Metadata, as one line of JSON.

Values of clients are bounded, and escaped so that they cannot break or disguise a line. Bodies,
query strings and credentials never become part of an Event. Pure.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Literal
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from paddock.claims.caller import Caller

MAX_PATH = 1024
MAX_AGENT = 256
MAX_NAME = 253
MAX_REASON = 256
MAX_CREATED = 1000
"""Ids of created objects on one line; further ones are counted."""
E2B_GROUP = "e2b.paddock.dev"
"""The `apiGroup` of calls to E2B's API."""
OPERATOR = "paddock:operator"
PEER = "paddock:peer"
"""A control plane of another cluster, which sends no key id."""
ANONYMOUS = "system:anonymous"

_API_KEY = re.compile(r"e2b_[0-9A-Za-z]+")
_UPLOAD = re.compile(r"(/templates/uploads/)[^/]+")
"""The URL of an upload is the permission for it."""
_PLAIN_PATH = re.compile(r"[/a-z0-9.-]*")
"""Needs no escaping and holds no key."""
_URI_SAFE = "/:@!$&'()*+,;=~"
_encoder = msgspec.json.Encoder()


class AuditUser(Struct, frozen=True, omit_defaults=True):
    """Who called. `groups` are team and role."""

    username: str
    uid: str = ""
    """The id of the API key, as `paddock keys ls` shows it."""
    groups: tuple[str, ...] = ()


class AuditedObject(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The object of a call."""

    resource: str = ""
    namespace: str = ""
    name: str = ""
    api_group: str = ""
    api_version: str = ""
    subresource: str = ""


class AuditStatus(Struct, frozen=True, omit_defaults=True):
    """The result of a call."""

    code: int
    status: str = ""
    reason: str = ""


class AuditEvent(Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag="Event"):
    """One line. The field names are those of Kubernetes."""

    api_version: Literal["audit.k8s.io/v1"] = "audit.k8s.io/v1"
    level: Literal["Metadata"] = "Metadata"
    audit_id: str = field(name="auditID")
    stage: Literal["ResponseComplete"] = "ResponseComplete"
    request_uri: str = field(name="requestURI")
    verb: str
    user: AuditUser
    source_ips: tuple[str, ...] = field(name="sourceIPs", default=())
    user_agent: str = ""
    object_ref: AuditedObject | UnsetType = UNSET
    response_status: AuditStatus
    request_received_timestamp: str
    stage_timestamp: str
    """Times are in UTC with six decimals, so that their text sorts."""
    annotations: Mapping[str, str] = {}

    @property
    def is_refused(self) -> bool:
        """Whether the call failed."""
        return self.response_status.code >= 400


def micro_time(moment: datetime) -> str:
    """Return a time in UTC as Kubernetes' MicroTime."""
    return moment.isoformat(timespec="microseconds")[:-6] + "Z"  # without +00:00


def encode(event: AuditEvent) -> bytes:
    """Return the line, with its newline."""
    return _encoder.encode(event) + b"\n"


def visible(text: str, limit: int) -> str:
    """Return text of a client: bounded, without control characters and without API keys."""
    text = text[:limit]
    if "e2b_" in text:
        text = _API_KEY.sub("e2b_...", text)
    if not text.isprintable():
        text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text[:limit]


def request_uri(path: str) -> str:
    """Return a path as a URI, bounded. Queries are left out: they may hold signatures."""
    path = path[:MAX_PATH]
    if "/templates/uploads/" in path:
        path = _UPLOAD.sub(r"\1...", path)
    if _PLAIN_PATH.fullmatch(path):
        return path
    if "e2b_" in path:
        path = _API_KEY.sub("e2b_...", path)
    return quote(path, _URI_SAFE, errors="replace")[:MAX_PATH]


def user_of(caller: Caller | None, unnamed: str) -> AuditUser:
    """Return the user of a call; `unnamed` is the name of an authenticated caller without key."""
    if caller is None:
        return AuditUser(ANONYMOUS, groups=("system:unauthenticated",))
    name = f"paddock:key:{caller.key_id}" if caller.key_id else unnamed
    return AuditUser(name, caller.key_id, (caller.team, caller.role))
