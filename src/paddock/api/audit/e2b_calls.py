"""Verb and object of every route of E2B's API, as the audit log shows them.

A test fails if a route is missing here. Until it is added, the line shows the method and the path.
"""

import re
from collections.abc import Mapping

from starlette.routing import compile_path

from paddock.api.audit.notes import AuditCall

_SANDBOXES: Mapping[tuple[str, str], AuditCall] = {
    ("POST", "/v2/sandboxes"): AuditCall("create", "sandboxes"),
    ("POST", "/sandboxes"): AuditCall("create", "sandboxes"),
    ("POST", "/v2/sandboxes:batch"): AuditCall("create", "sandboxes", "batch"),
    ("GET", "/v2/sandboxes"): AuditCall("list", "sandboxes"),
    ("GET", "/sandboxes"): AuditCall("list", "sandboxes"),
    ("GET", "/sandboxes/metrics"): AuditCall("list", "sandboxes", "metrics"),
    ("GET", "/sandboxes/{id}"): AuditCall("get", "sandboxes"),
    ("DELETE", "/sandboxes/{id}"): AuditCall("delete", "sandboxes"),
    ("POST", "/sandboxes/{id}/pause"): AuditCall("pause", "sandboxes"),
    ("POST", "/sandboxes/{id}/resume"): AuditCall("resume", "sandboxes"),
    ("POST", "/sandboxes/{id}/connect"): AuditCall("connect", "sandboxes"),
    ("POST", "/v2/sandboxes/{id}/connect"): AuditCall("connect", "sandboxes"),
    ("POST", "/sandboxes/{id}/timeout"): AuditCall("update", "sandboxes", "timeout"),
    ("POST", "/sandboxes/{id}/refreshes"): AuditCall("extend", "sandboxes", "timeout"),
    ("GET", "/sandboxes/{id}/network"): AuditCall("get", "sandboxes", "network"),
    ("PUT", "/sandboxes/{id}/network"): AuditCall("update", "sandboxes", "network"),
    ("POST", "/sandboxes/{id}/fork"): AuditCall("fork", "sandboxes"),
    ("POST", "/sandboxes/{id}/snapshots"): AuditCall("snapshot", "sandboxes"),
    ("GET", "/sandboxes/{id}/metrics"): AuditCall("get", "sandboxes", "metrics"),
    ("GET", "/sandboxes/{id}/logs"): AuditCall("get", "sandboxes", "log"),
    ("GET", "/v2/sandboxes/{id}/logs"): AuditCall("get", "sandboxes", "log"),
}

_TEMPLATES: Mapping[tuple[str, str], AuditCall] = {
    ("GET", "/templates"): AuditCall("list", "templates"),
    ("GET", "/v2/templates"): AuditCall("list", "templates"),
    ("GET", "/default-templates"): AuditCall("list", "templates"),
    ("GET", "/templates/aliases/{alias:path}"): AuditCall("get", "templates", "alias", "alias"),
    ("GET", "/snapshots"): AuditCall("list", "snapshots"),
    ("GET", "/templates/{id:path}"): AuditCall("get", "templates"),
    ("DELETE", "/templates/{id:path}"): AuditCall("delete", "templates"),
    ("PATCH", "/templates/{id:path}"): AuditCall("patch", "templates"),
    ("PATCH", "/v2/templates/{id:path}"): AuditCall("patch", "templates"),
}

_BUILDS: Mapping[tuple[str, str], AuditCall] = {
    ("POST", "/v3/templates"): AuditCall("create", "templates", "builds"),
    ("POST", "/v2/templates"): AuditCall("create", "templates", "builds"),
    ("POST", "/v2/templates/{id:path}/builds/{build}"): AuditCall("start", "templates", "builds"),
    ("GET", "/templates/{id:path}/builds/{build}/status"): AuditCall("get", "templates", "builds"),
    ("GET", "/templates/{id:path}/builds/{build}/logs"): AuditCall("get", "templates", "builds"),
    ("GET", "/templates/{id:path}/files/{hash}"): AuditCall("get", "templates", "files"),
    ("PUT", "/templates/uploads/{token}"): AuditCall("update", "templates", "files", name=""),
    ("POST", "/templates/tags"): AuditCall("create", "templates", "tags"),
    ("DELETE", "/templates/tags"): AuditCall("delete", "templates", "tags"),
    ("GET", "/templates/{id:path}/tags"): AuditCall("get", "templates", "tags"),
}

_KEYS: Mapping[tuple[str, str], AuditCall] = {
    ("GET", "/api-keys"): AuditCall("list", "keys"),
    ("POST", "/api-keys"): AuditCall("create", "keys"),
    ("PATCH", "/api-keys/{id}"): AuditCall("patch", "keys"),
    ("POST", "/api-keys/{id}/rotate"): AuditCall("rotate", "keys"),
    ("DELETE", "/api-keys/{id}"): AuditCall("delete", "keys"),
    ("GET", "/teams"): AuditCall("list", "teams"),
    ("PATCH", "/teams/{name}"): AuditCall("patch", "teams", name="name"),
}

_UNSUPPORTED: Mapping[tuple[str, str], AuditCall] = {
    ("POST", "/templates"): AuditCall("create", "templates"),
    ("GET", "/volumes"): AuditCall("list", "volumes"),
    ("POST", "/volumes"): AuditCall("create", "volumes"),
    ("GET", "/volumes/{id}"): AuditCall("get", "volumes"),
    ("DELETE", "/volumes/{id}"): AuditCall("delete", "volumes"),
    ("GET", "/secrets"): AuditCall("list", "secrets"),
    ("POST", "/secrets"): AuditCall("create", "secrets"),
    ("GET", "/secrets/{id}"): AuditCall("get", "secrets"),
    ("DELETE", "/secrets/{id}"): AuditCall("delete", "secrets"),
    ("GET", "/volumecontent/{id}/dir"): AuditCall("get", "volumes", "dir"),
    ("POST", "/volumecontent/{id}/dir"): AuditCall("create", "volumes", "dir"),
    ("GET", "/volumecontent/{id}/path"): AuditCall("get", "volumes", "path"),
    ("PATCH", "/volumecontent/{id}/path"): AuditCall("patch", "volumes", "path"),
    ("DELETE", "/volumecontent/{id}/path"): AuditCall("delete", "volumes", "path"),
    ("GET", "/volumecontent/{id}/file"): AuditCall("get", "volumes", "file"),
    ("PUT", "/volumecontent/{id}/file"): AuditCall("update", "volumes", "file"),
    ("POST", "/access-tokens"): AuditCall("create", "accesstokens"),
    ("DELETE", "/access-tokens/{id}"): AuditCall("delete", "accesstokens"),
    ("GET", "/teams/{id}/metrics"): AuditCall("get", "teams", "metrics"),
    ("GET", "/teams/{id}/metrics/max"): AuditCall("get", "teams", "metrics"),
    ("GET", "/nodes"): AuditCall("list", "nodes"),
    ("GET", "/nodes/{id}"): AuditCall("get", "nodes"),
    ("POST", "/nodes/{id}"): AuditCall("update", "nodes"),
    ("POST", "/admin/{rest:path}"): AuditCall("create", "admin", name="rest"),
}

CALLS: Mapping[tuple[str, str], AuditCall] = {
    **_SANDBOXES,
    **_TEMPLATES,
    **_BUILDS,
    **_KEYS,
    **_UNSUPPORTED,
}
"""By method and path of the route."""

_SANDBOX_PATHS = tuple(
    (method, compile_path(path)[0], call)
    for (method, path), call in _SANDBOXES.items()
    if "{id}" in path
)
_PREFIX = re.compile(r"^/kruise/api(?=/)")


def call_of_sandbox(method: str, path: str) -> AuditCall | None:
    """Return the call that a path to one sandbox stands for, without the router."""
    path = _PREFIX.sub("", path)
    for wanted, pattern, call in _SANDBOX_PATHS:
        if wanted == method and pattern.match(path):
            return call
    return None
