"""Parse which sandbox and port a request is for.

In order: the path `/kruise/<id>/<port>/…`, E2B's headers, OpenSandbox's header, the host's
leftmost label (`<port>-<id>` or `<id>-<port>`), a signed file URL without an id. A request with
none of these is for the API. Pure; `routes` knows which sandboxes exist.
"""

import re
from functools import lru_cache
from urllib.parse import parse_qs

from msgspec import Struct

ENVD_PORT = 49983
TASKS_PORT = 5758
_MAX_FIELDS = 64

_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)?$")
_PATH = re.compile(r"/kruise/(?!api(?:/|$))([^/?]+)/([^/?]+)(/[^?]*)?(\?.*)?$")
_NUMBER = re.compile(r"[0-9]{1,5}$")
_LABEL_PORT_FIRST = re.compile(r"([0-9]{1,5})-([a-z0-9-]+)$")
_LABEL_ID_FIRST = re.compile(r"([a-z0-9]+)-([0-9]{1,5})$")
_CONNECT = re.compile(r"/(?:v2/)?sandboxes/([^/?]+)/connect$")
_EXPIRATION = re.compile(r"[0-9]{1,19}$")
_IP = re.compile(r"[0-9.]+$|\[")


class Destination(Struct, frozen=True):
    """A port of a sandbox, and the request target."""

    sandbox_id: str
    port: int
    target: str
    """The request target to forward: path and query."""
    prefix: str | None = None
    """The part of the address's origin that belongs to the sandbox: all of it (None) if addressed
    by host, `/kruise/<id>/<port>` by path, nothing by headers."""


class SignedFile(Struct, frozen=True):
    """A file URL that identifies its sandbox by the signature only."""

    signature: str
    path: str
    user: str
    operation: str
    expiration: int | None


class Malformed(Struct, frozen=True):
    """The request names a sandbox in a way that cannot be parsed."""

    message: str


Address = Destination | SignedFile | Malformed | None


def parse(
    *,
    method: str,
    target: str,
    host: str,
    sandbox_header: str | None,
    port_header: str | None,
    ingress_header: str | None,
) -> Address:
    """Return where a request goes; None is the API."""
    if target.startswith("/kruise/") and (match := _PATH.match(target)):
        rest = (match[3] or "/") + (match[4] or "")
        return _destination(match[1], match[2], rest, f"/kruise/{match[1]}/{match[2]}")
    if sandbox_header is not None:
        if _is_connect(method, target, sandbox_header, port_header):
            return None
        return _destination(sandbox_header, port_header or str(ENVD_PORT), target, "")
    if ingress_header is not None:
        sandbox_id, dash, port = ingress_header.rpartition("-")
        if not dash:
            return Malformed("Invalid OpenSandbox-Ingress-To: <id>-<port> is expected")
        return _destination(sandbox_id, port, target, "")
    if (found := _from_host(host, target)) is not None:
        return found
    return signed_file(method, target)


def _is_connect(method: str, target: str, sandbox_id: str, port: str | None) -> bool:
    """Whether this is the API's connect call, on which older SDKs send the sandbox headers too."""
    match = _CONNECT.match(target) if method == "POST" and port == str(ENVD_PORT) else None
    return match is not None and match[1] == sandbox_id


def _destination(
    sandbox_id: str, port: str, target: str, prefix: str | None = None
) -> Destination | Malformed:
    found = _sandbox_and_port(sandbox_id, port)
    if isinstance(found, Malformed):
        return found
    return Destination(found[0], found[1], target, prefix)


@lru_cache(16_384)
def _sandbox_and_port(sandbox_id: str, port: str) -> tuple[str, int] | Malformed:
    lowered = sandbox_id.strip().lower()
    if not _ID.match(lowered):
        return Malformed("Invalid sandbox id")
    port = port.strip()  # Strips more than `int` does.
    if not _NUMBER.match(port) or not 0 < int(port) < 65536:
        return Malformed("Invalid sandbox port")
    # Older clients append their client id to the sandbox's.
    return lowered.partition("-")[0], int(port)


def _from_host(host: str, target: str) -> Destination | Malformed | None:
    if "-" not in host or _IP.match(host):
        return None
    label, dot, _ = host.lower().partition(".")
    if not dot:
        return None
    if match := _LABEL_PORT_FIRST.match(label):
        return _destination(match[2], match[1], target)
    if match := _LABEL_ID_FIRST.match(label):
        return _destination(match[1], match[2], target)
    return None


def signed_file(method: str, target: str) -> SignedFile | None:
    """Parse a signed file URL; None if it is not one."""
    path, _, query = target.partition("?")
    if path != "/files" or "signature=" not in query or query.count("&") > _MAX_FIELDS:
        return None
    fields = parse_qs(query, keep_blank_values=True)
    if "signature" not in fields:
        return None
    expiration = fields.get("signature_expiration", [""])[0]
    return SignedFile(
        signature=fields["signature"][0],
        path=fields.get("path", [""])[0],
        user=fields.get("username", [""])[0],
        operation="write" if method in ("POST", "PUT") else "read",
        expiration=int(expiration) if _EXPIRATION.match(expiration) else None,
    )
